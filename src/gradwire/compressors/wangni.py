"""Wangni's sparsification: keeps entries at random, larger ones likelier, and scales them up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import MultiRound, Traits, check_payload, flat32, memoized
from gradwire.checks import check_positive_fraction
from gradwire.compressors._sparsifier import count_for_ratio
from gradwire.errors import WireError
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
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits
from gradwire.wire.indices import check_index, index_field, pack_index, unpack_index
from gradwire.wire.layout import max_bytes, packed_bytes

ROUNDS = 4
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Wangni(MultiRound):
    """Sends entry x with probability p = min(1, |x|/s), as x/p; unbiased.

    These probabilities have the least variance for their number of entries: the scale s is such
    that about a `ratio` of them is sent. Entries of s and above are always sent, as float32; all
    others decode to plus or minus s, so they are sent as a sign, and s once. The variance is at
    most n/k - 1 of the squared norm for k up to n/2 (that of a uniform choice): no contraction. It
    has its own all-gather, since lengths vary. Zeros are never sent, NaN and infinity always.
    """

    ratio: float

    rounds_like: ClassVar = "gather"
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Wangni et al. 2018, arXiv:1710.09854"
    message: ClassVar = (
        "counts of large and small entries as int32, scale as float32; positions and float32 "
        "values of the large; positions and signs of the small"
    )

    def __post_init__(self) -> None:
        check_positive_fraction("wangni", "ratio", self.ratio)

    @memoized
    def traits(self) -> Traits:
        why_not = f"it is unbiased with a variance of up to {1 / self.ratio - 1:.3g} squared norms"
        return Traits(
            unbiased=True, variable_length=True, why_not=why_not, propagates_nonfinite=True
        )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        layout = self.layout(ctx.numel)
        parts = self._parts(ef.total(), ctx)
        if ef.residual_out is not None:
            add(ef.residual_out, parts, -1.0)
        messages = yield AllGather(parts, layout, [layout] * ctx.world_size)
        out = ef.grad.zero_()
        for message in messages:
            add(out, message, 1 / ctx.world_size)
        return out

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        parts = self._parts(flat, ctx)
        return Payload(parts, ctx, packed_bytes([parts], [self.layout(x.numel())]))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: self.layout(ctx.numel))
        out = torch.zeros(payload.ctx.numel, device=payload.parts[0].device)
        add(out, payload.parts, 1.0)
        return out.view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the length of a typical message, in which most entries are below the scale."""
        numel = torch.Size(shape).numel()
        count = count_for_ratio(self.ratio, numel)
        signs = Field(torch.uint8, packed_numel(count, 1))
        typical = Layout((index_field(numel, count), signs))
        return packed_bytes(None, [self.layout(numel), typical])

    @memoized
    def layout(self, numel: int) -> Layout:
        """Returns the layout of a message.

        Counts of large and small entries, the scale; positions and values of the large; positions
        and signs of the small.
        """
        positions, signs = Field(torch.uint8, None), Field(torch.uint8, None)
        head = (Field(torch.int32, 2), Field(torch.float32, 1))
        fields = (*head, positions, Field(torch.float32, None), positions, signs)
        return Layout(fields, lambda parts: check(parts, numel), max_bytes(numel))

    def _parts(self, x: Tensor, ctx: EncodeContext) -> Parts:
        size = x.abs()
        scale = scale_for(size.nan_to_num(0.0, 0.0), count_for_ratio(self.ratio, x.numel()))
        # Written so that NaN is large.
        large = (x != 0) & ~(size < scale)
        draw = kernels.on(x.device).uniform(ctx.own_key(), x.numel(), x.device)
        small = (draw * scale < size) & (size < scale)
        high, low = (torch.nonzero(selected).view(-1) for selected in (large, small))
        counts = torch.tensor([high.numel(), low.numel()], dtype=torch.int32, device=x.device)
        signs = pack_bits(x[low] < 0, 1)
        positions = [pack_index(index, x.numel()) for index in (high, low)]
        return counts, scale.view(1), positions[0], x[high], positions[1], signs


def scale_for(size: Tensor, count: int) -> Tensor:
    """Returns the s at which sum min(1, size/s) is about `count`, from above; 0 if all is zero."""
    scale = size.sum(dtype=torch.float64) / max(1, count)
    for _ in range(ROUNDS):
        below = size < scale
        # Each large entry counts as one; the small ones share what is left of the count.
        left = count - size.numel() + below.sum()
        better = (size * below).sum(dtype=torch.float64) / left
        scale = torch.where((left > 0) & (better > 0), torch.minimum(better, scale), scale)
    return scale.clamp(max=LARGEST).to(size.dtype)


def add(out: Tensor, parts: Parts, weight: float) -> None:
    """Adds `weight` times the decoded message to `out`."""
    counts, scale, high, values, low, signs = parts
    large, small = counts.tolist()
    out.index_add_(0, unpack_index(high, out.numel(), large), values * weight)
    minus = unpack_bits(signs, 1, small).to(out.dtype)
    out.index_add_(0, unpack_index(low, out.numel(), small), (1 - 2 * minus) * (scale * weight))


def check(parts: Parts, numel: int) -> None:
    """Raises WireError unless all lengths follow from the counts, and positions are in range."""
    counts, _, high, values, low, signs = parts
    large, small = counts.tolist()
    if not 0 <= large <= numel or not 0 <= small <= numel:
        raise WireError(f"message holds {large} and {small} entries of a tensor of {numel}")
    lengths = [index_field(numel, large).numel, large]
    lengths += [index_field(numel, small).numel, packed_numel(small, 1)]
    if lengths != [part.numel() for part in (high, values, low, signs)]:
        raise WireError(f"message has parts of other lengths than {large} and {small} entries take")
    check_index(high, numel, large)
    check_index(low, numel, small)
