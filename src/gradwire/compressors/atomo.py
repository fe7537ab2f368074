"""ATOMO: a few singular vectors of a gradient, drawn so that their expectation is the gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import MultiRound, Traits, check_payload, flat32, memoized
from gradwire.checks import check_whole
from gradwire.compressors._low_rank import matrix_shape
from gradwire.types import (
    AllGather,
    EFInput,
    EncodeContext,
    Field,
    Layout,
    Parts,
    Payload,
    Rounds,
    State,
)
from gradwire.wire.layout import packed_bytes


@dataclass(frozen=True)
class Atomo(MultiRound):
    """Sends `rank` singular vectors of a gradient, drawn at random; unbiased.

    Atom i of the singular value decomposition is kept with probability p_i, in proportion to its
    singular value s_i and at most 1, and sent as s_i/p_i times its vectors. No other probabilities
    for as many atoms have less variance: Σ s_i² (1/p_i - 1), at most n/rank - 1 of the squared norm
    for a shorter side n. The p_i add up to `rank` and one random number decides for all, so exactly
    `rank` atoms are kept, where independent draws would keep so many on average. Gradients of that
    rank are exact. The decomposition is slow for large matrices. Zeros decode to zeros; NaN or
    infinity anywhere makes all entries NaN.
    """

    rank: int = 3

    rounds_like: ClassVar = "gather"
    examples: ClassVar = ({"rank": 3}, {"rank": 1})
    family: ClassVar = "low rank"
    paper: ClassVar = "Wang et al. 2018, arXiv:1806.04090"
    message: ClassVar = "rows x rank and columns x rank float32"

    def __post_init__(self) -> None:
        check_whole("atomo", "rank", self.rank, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(
            syncs_host=True,
            unbiased=True,
            why_not=f"its variance is up to n/{self.rank} - 1 of the squared norm where n is the "
            "shorter side of the matrix",
            propagates_nonfinite=True,
        )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        m = ef.total().view(matrix_shape(ctx.shape))
        u, v = self._draw(m, ctx)
        if ef.residual_out is not None:
            m.addmm_(u, v.T, alpha=-1)
        layout = self._layout(ctx.shape)
        messages = yield AllGather((u.view(-1), v.view(-1)), layout, [layout] * ctx.world_size)
        out = ef.grad.zero_()
        for parts in messages:
            residual_out, right = self._vectors(parts, ctx)
            out.view(matrix_shape(ctx.shape)).addmm_(
                residual_out, right.T, alpha=1 / ctx.world_size
            )
        return out

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        m = flat.view(matrix_shape(ctx.shape))
        u, v = self._draw(m, ctx)
        return Payload((u.view(-1), v.view(-1)), ctx, self.nbytes(ctx.shape))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: self._layout(ctx.shape))
        u, v = self._vectors(payload.parts, payload.ctx)
        return (u @ v.T).view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        return packed_bytes(None, [self._layout(tuple(shape))])

    def _count(self, shape: Sequence[int]) -> int:
        return min(self.rank, *matrix_shape(shape))

    @memoized
    def _layout(self, shape: tuple[int, ...]) -> Layout:
        sides, count = matrix_shape(shape), self._count(shape)
        return Layout(tuple(Field(torch.float32, side * count) for side in sides))

    def _vectors(self, parts: Parts, ctx: EncodeContext) -> tuple[Tensor, Tensor]:
        (rows, cols), count = matrix_shape(ctx.shape), self._count(ctx.shape)
        return parts[0].view(rows, count), parts[1].view(cols, count)

    def _draw(self, m: Tensor, ctx: EncodeContext) -> tuple[Tensor, Tensor]:
        """The kept atoms: left vectors times s/p [rows, count], and right ones [cols, count]."""
        count = self._count(ctx.shape)
        if not count:
            return m.new_zeros(m.shape[0], 0), m.new_zeros(m.shape[1], 0)
        # The decomposition refuses what is no number, and squares leave the range of float32.
        clean = m.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        scale = clean.abs().amax()
        u, s, vh = torch.linalg.svd(clean / torch.where(scale > 0, scale, 1.0), full_matrices=False)
        chance = chances(s, count)
        upto = chance.cumsum(0)
        # Atom i owns a stretch of length p_i; ticks at distance 1 hit it with that probability.
        draw = kernels.on(m.device).uniform(ctx.own_key(), 1, m.device).double()
        tick = draw + torch.arange(count, device=m.device)
        kept = torch.searchsorted(upto, tick, right=True).clamp(max=s.numel() - 1)
        size = torch.where(tick < upto[-1], s.double()[kept] / chance[kept], 0.0) * scale
        bad = torch.where(m.isfinite().all(), 0.0, torch.nan)
        return (u[:, kept] * size + bad).to(m.dtype), vh[kept].T.contiguous()


def chances(s: Tensor, count: int) -> Tensor:
    """Probabilities in proportion to `s` (descending), at most 1, that add up to `count`.

    Where a share would exceed 1 the atom is certain, and the others share what is left of the
    count. They add up to less only where fewer than `count` of `s` are above zero.
    """
    s = s.double()
    rest = s.flip(0).cumsum(0).flip(0)
    before = torch.arange(s.numel(), device=s.device)
    fits = (count - before) * s <= rest
    certain = (~fits).long().cumprod(0).sum()
    place = certain.clamp(max=s.numel() - 1)
    share = (count - certain) * s / torch.where(rest[place] > 0, rest[place], 1.0)
    return torch.where(before < certain, 1.0, share.clamp(max=1.0))
