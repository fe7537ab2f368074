"""PowerSGD: the best low-rank picture of a gradient that one step of power iteration finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import MultiRound, Traits, check_payload, flat32
from gradwire.checks import check_whole
from gradwire.compressors._low_rank import give_out, matrix_shape, renewed, starts, take_in
from gradwire.types import EFInput, EncodeContext, Field, Layout, Mean, Payload, Rounds, State


@dataclass(frozen=True)
class PowerSGD(MultiRound):
    """Sends a gradient M as P Qᵀ with `rank` columns, in two rounds of plain means.

    P is the mean of M Q for last step's Q, made orthonormal; the new Q is the mean of Mᵀ P. Each
    worker has then said P Pᵀ M, the projection of its M on the common P, which never adds error. It
    is exact where the mean gradient has rank `rank` at most. From a random start it says rank/n of
    the squared norm on average at least, n the number of columns; Q then turns towards what is
    large and stays (power iteration). Zeros are said as zeros and leave Q as it was; NaN and
    infinity show in the result, and do not stay in Q.
    """

    rank: int = 1

    rounds_like: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727"

    def __post_init__(self) -> None:
        check_whole("powersgd", "rank", self.rank, 1)

    def traits(self) -> Traits:
        return Traits(summable=True, contraction=True, propagates_nonfinite=True)

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        _, cols = matrix_shape(ctx.shape)
        [q] = starts([cols], self.rank, ctx, device)
        return {"q": q}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        m, p = take_in(ef, ctx, state["q"])  # [rows, cols], [rows, rank]
        do = kernels.at(m)
        [(p,)] = yield Mean((p,))
        p = do.orthonormal(p)
        own = do.factor(m, p, True)
        if ef.residual_out is not None:
            do.lessen(m, p, own)
        [(q,)] = yield Mean((own,))  # [cols, rank]
        state["q"] = renewed(state["q"], q)
        return give_out(ef, ctx, p, q)

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        m, p = take_in(EFInput(flat), ctx, self.state(ctx, x.device)["q"])
        p = kernels.at(m).orthonormal(p)
        q = kernels.at(m).factor(m, p, True)
        return Payload((p.view(-1), q.view(-1)), ctx, self.nbytes(ctx.shape))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, self._layout)
        (rows, cols), rank = matrix_shape(payload.ctx.shape), self._rank(payload.ctx.shape)
        p, q = payload.parts
        return (p.view(rows, rank) @ q.view(cols, rank).T).view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        return 4 * self._rank(shape) * sum(matrix_shape(shape))

    def _rank(self, shape: Sequence[int]) -> int:
        return min(self.rank, *matrix_shape(shape))

    def _layout(self, ctx: EncodeContext) -> Layout:
        """Of a payload; what travels are sums of such factors."""
        rank = self._rank(ctx.shape)
        sides = matrix_shape(ctx.shape)
        return Layout(tuple(Field(torch.float32, side * rank) for side in sides))
