"""ACP-SGD: PowerSGD with one factor a step, so that one mean is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import MultiRound, Traits, check_payload, flat32
from gradwire.checks import check_whole
from gradwire.compressors._low_rank import give_out, matrix_shape, renewed, starts, take_in
from gradwire.kernels.reference.random import random_bits
from gradwire.types import EFInput, EncodeContext, Field, Layout, Mean, Payload, Rounds, State

ANEW = 100
"""After so many steps a column of the subspace is drawn anew. Even, for the shorter side."""


@dataclass(frozen=True)
class AcpSGD(MultiRound):
    """Sends one factor of a gradient M ≈ P Qᵀ with `rank` columns: P on even steps, Q on odd ones.

    On an even step Q of the step before is made orthonormal and P is the mean of M Q; on an odd one
    the parts are swapped. Each worker has then said the projection of its M on a subspace that all
    know: half of PowerSGD's bytes, in one round. A projection never adds error, and from a random
    start it says rank/n of the squared norm on average, n the shorter side; but of what is at right
    angles to the subspace it says nothing. So every 100th step draws one column anew and says 1/n
    on average, whatever came before: a contraction over 100 steps. A gradient of that rank which
    stays the same is all said with every second step. NaN and infinity show in the result, and do
    not stay in the factors.
    """

    rank: int = 1

    rounds_like: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Zhang et al. 2023, arXiv:2306.08881"

    def __post_init__(self) -> None:
        check_whole("acpsgd", "rank", self.rank, 1)

    def traits(self) -> Traits:
        return Traits(
            summable=True, contraction=True, propagates_nonfinite=True, step_dependent=True
        )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        sides = sorted(matrix_shape(ctx.shape), reverse=True)
        # P has a start too, since a lane may begin on an odd step; and the longer side, so that the
        # first step projects on the shorter.
        p, q = starts(sides, self.rank, ctx, device)
        return {"p": p, "q": q}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        new, old = _factors(ctx)
        base = _base(state[old], ctx)
        m, own = take_in(ef, ctx, base, _turned(ctx))
        if ef.residual_out is not None:
            kernels.at(m).lessen(m, *_sides(own, base, ctx))
        [(mean,)] = yield Mean((own,))
        state[new] = renewed(state[new], mean)
        return give_out(ef, ctx, *_sides(mean, base, ctx))

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        _, own = take_in(EFInput(flat), ctx, self._start(ctx, x.device), _turned(ctx))
        return Payload((own.view(-1),), ctx, own.nbytes)

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: Layout((Field(torch.float32, prod(self._side(ctx))),)))
        own = payload.parts[0].view(self._side(payload.ctx))
        p, q = _sides(own, self._start(payload.ctx, own.device), payload.ctx)
        return (p @ q.T).view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        """The larger factor, which even steps say."""
        rows, cols = matrix_shape(shape)
        return 4 * min(self.rank, rows, cols) * max(rows, cols)

    def _side(self, ctx: EncodeContext) -> tuple[int, int]:
        """The shape of the factor that this step says."""
        rows, cols = matrix_shape(ctx.shape)
        return cols if _turned(ctx) else rows, min(self.rank, rows, cols)

    def _start(self, ctx: EncodeContext, device: torch.device) -> Tensor:
        return _base(self.state(ctx, device)[_factors(ctx)[1]], ctx)


def _factors(ctx: EncodeContext) -> tuple[str, str]:
    """Which factor this step says, and on which it projects."""
    return ("p", "q") if ctx.step % 2 == 0 else ("q", "p")


def _base(factor: Tensor, ctx: EncodeContext) -> Tensor:
    """Orthonormal columns of the subspace; now and then with a random one for the last."""
    if ctx.step and ctx.step % ANEW == 0:
        coins = random_bits(ctx.shared_key(), factor.shape[0], factor.device) & 1
        drawn = (1 - 2 * coins).to(factor.dtype).unsqueeze(1)
        factor = torch.cat([factor[:, :-1], drawn[:, : factor.shape[1]]], dim=1)
    return kernels.at(factor).orthonormal(factor)


def _turned(ctx: EncodeContext) -> bool:
    """Whether this step says a factor with the side of the columns."""
    rows, cols = matrix_shape(ctx.shape)
    return (rows < cols) != (ctx.step % 2 == 1)


def _sides(said: Tensor, base: Tensor, ctx: EncodeContext) -> tuple[Tensor, Tensor]:
    """The factor with the side of the rows, and the one with that of the columns."""
    return (base, said) if _turned(ctx) else (said, base)
