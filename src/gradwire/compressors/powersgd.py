"""PowerSGD: a low-rank approximation of a gradient by one step of power iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    update_base,
    write_product,
)
from gradwire.types import EFInput, EncodeContext, Field, Layout, Mean, Payload, Rounds, State


@dataclass(frozen=True)
class PowerSGD(MultiRound):
    """Sends a gradient M as P Qᵀ with `rank` columns, in two rounds of plain means.

    P is the mean of M Q for last step's Q, made orthonormal; the new Q is the mean of Mᵀ P. Each
    worker has then sent P Pᵀ M, the projection of its M on the common P, so that the residual is
    never longer than M. It is exact if the mean gradient has at most rank `rank` and M Q spans its
    columns, as it almost surely does for a random Q. From a random start it keeps at least
    rank/n of the squared norm on average, n the number of columns; Q then converges to the largest
    persistent directions (power iteration). Between steps Q is kept orthonormal, so neither large
    nor small gradients leave the range of float32. Zeros decode to zeros and leave Q as it was; NaN
    and infinity appear in the result, and do not stay in Q.
    """

    rank: int = 1

    rounds_like: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727"
    message: ClassVar = "round 1: rows x rank float32; round 2: columns x rank float32"

    def __post_init__(self) -> None:
        check_whole("powersgd", "rank", self.rank, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(summable=True, contraction=True, propagates_nonfinite=True)

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        _, cols = matrix_shape(ctx.shape)
        [q] = initial_factors([cols], self.rank, ctx, device)
        return {"q": q}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        m, p = load_and_project(ef, ctx, state["q"])  # [rows, cols], [rows, rank]
        ops = kernels.on(m.device)
        [(p,)] = yield Mean((p,))
        p = ops.orthonormal(p)
        own = ops.factor(m, p, True)
        if ef.residual_out is not None:
            ops.subtract_low_rank(m, p, own)
        [(q,)] = yield Mean((own,))  # [cols, rank]
        state["q"] = update_base(state["q"], q)
        return write_product(ef, ctx, p, q)

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        m, p = load_and_project(EFInput(flat), ctx, self.state(ctx, x.device)["q"])
        p = kernels.on(m.device).orthonormal(p)
        q = kernels.on(m.device).factor(m, p, True)
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
        """Returns the layout of a payload; the all-reduces sum such factors."""
        rank = self._rank(ctx.shape)
        sides = matrix_shape(ctx.shape)
        return Layout(tuple(Field(torch.float32, side * rank) for side in sides))
