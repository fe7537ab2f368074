"""ACP-SGD: PowerSGD with one factor per step, so that one mean is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import MultiRound, Traits, check_payload, flat32, memoized
from gradwire.checks import check_whole
from gradwire.compressors._low_rank import (
    initial_factors,
    load_and_project,
    matrix_shape,
    update_factor,
    write_product,
)
from gradwire.kernels.reference.random import random_bits
from gradwire.types import EFInput, EncodeContext, Field, Layout, Mean, Payload, Rounds, State

REDRAW_EVERY = 100
"""Steps between redraws of a column of the subspace. Even, so that the shorter side is redrawn."""


@dataclass(frozen=True)
class AcpSGD(MultiRound):
    """Sends one factor of a gradient M ≈ P Qᵀ with `rank` columns: P on even steps, Q on odd ones.

    On an even step Q of the step before is made orthonormal and P is the mean of M Q; on an odd one
    the roles are swapped. Each worker has then sent the projection of its M on a subspace that all
    ranks know: half of PowerSGD's bytes, in one round. A projection never adds error, and from a
    random start it keeps rank/n of the squared norm on average, n the shorter side; but it drops
    everything orthogonal to the subspace. So every 100th step redraws one column and keeps 1/n on
    average, whatever came before: a contraction over 100 steps. A gradient of that rank that stays
    constant is sent in full every second step. NaN and infinity appear in the result, and do not
    stay in the factors.
    """

    rank: int = 1

    rounds_like: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Zhang et al. 2023, arXiv:2306.08881"
    message: ClassVar = "longer side x rank float32 on even steps, shorter on odd ones"

    def __post_init__(self) -> None:
        check_whole("acpsgd", "rank", self.rank, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(
            summable=True, contraction=True, propagates_nonfinite=True, step_dependent=True
        )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        sides = sorted(matrix_shape(ctx.shape), reverse=True)
        # P has an initial value too, since a lane may begin on an odd step; and the longer side, so
        # that the first step projects on the shorter.
        p, q = initial_factors(sides, self.rank, ctx, device)
        return {"p": p, "q": q}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        new, old = _factors(ctx)
        base = _base(state[old], ctx)
        m, own = load_and_project(ef, ctx, base, _sends_columns(ctx))
        if ef.residual_out is not None:
            kernels.on(m.device).subtract_low_rank(m, *_sides(own, base, ctx))
        [(mean,)] = yield Mean((own,))
        state[new] = update_factor(state[new], mean)
        return write_product(ef, ctx, *_sides(mean, base, ctx))

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        _, own = load_and_project(
            EFInput(flat), ctx, self._start(ctx, x.device), _sends_columns(ctx)
        )
        return Payload((own.view(-1),), ctx, own.nbytes)

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: Layout((Field(torch.float32, prod(self._side(ctx))),)))
        own = payload.parts[0].view(self._side(payload.ctx))
        p, q = _sides(own, self._start(payload.ctx, own.device), payload.ctx)
        return (p @ q.T).view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the size of the larger factor, which even steps send."""
        rows, cols = matrix_shape(shape)
        return 4 * min(self.rank, rows, cols) * max(rows, cols)

    def _side(self, ctx: EncodeContext) -> tuple[int, int]:
        """Returns the shape of the factor that this step sends."""
        rows, cols = matrix_shape(ctx.shape)
        return cols if _sends_columns(ctx) else rows, min(self.rank, rows, cols)

    def _start(self, ctx: EncodeContext, device: torch.device) -> Tensor:
        return _base(self.state(ctx, device)[_factors(ctx)[1]], ctx)


def _factors(ctx: EncodeContext) -> tuple[str, str]:
    """Returns the names of the factor that this step sends, and of the one it projects on."""
    return ("p", "q") if ctx.step % 2 == 0 else ("q", "p")


def _base(factor: Tensor, ctx: EncodeContext) -> Tensor:
    """Returns orthonormal columns of the subspace; in a redraw step the last one is random."""
    if ctx.step and ctx.step % REDRAW_EVERY == 0:
        coins = random_bits(ctx.shared_key(), factor.shape[0], factor.device) & 1
        drawn = (1 - 2 * coins).to(factor.dtype).unsqueeze(1)
        factor = torch.cat([factor[:, :-1], drawn[:, : factor.shape[1]]], dim=1)
    return kernels.on(factor.device).orthonormal(factor)


def _sends_columns(ctx: EncodeContext) -> bool:
    """Returns whether this step sends the factor that has the columns' side."""
    rows, cols = matrix_shape(ctx.shape)
    return (rows < cols) != (ctx.step % 2 == 1)


def _sides(sent: Tensor, base: Tensor, ctx: EncodeContext) -> tuple[Tensor, Tensor]:
    """Returns the factor with the rows' side, and the one with the columns' side."""
    return (base, sent) if _sends_columns(ctx) else (sent, base)
