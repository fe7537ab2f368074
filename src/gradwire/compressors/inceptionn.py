"""INCEPTIONN: more bits for larger entries, none for the smallest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits
from gradwire.wire.layout import max_bytes, packed_bytes

SMALLEST = 2.0**-14
"""Smallest bound for which seven bits reach from the smallest entry sent to the largest."""


@dataclass(frozen=True)
class Inceptionn(OneRound):
    """Sends a 2-bit tag per entry, then nothing, 8, 16 or 32 bits as its magnitude needs.

    With 2^-k the power of two at or below `bound` and m = k // 2: entries from 1 on are sent as
    float32, from 2^-m on as 16-bit and from 2^-k on as 8-bit fixed point (8 bits reach from 2^-m
    down to 2^-(m+7), so the leading one is always among them), smaller ones not at all. No entry is
    off by more than `bound`, whatever the tensor's scale; hence all of a tensor may be lost. An
    entry that is sent keeps its sign and at least half its size. NaN and infinity are kept.
    """

    bound: float = 2.0**-10

    examples: ClassVar = ({}, {"bound": 0.01})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Li et al. 2018, MICRO-51"
    message: ClassVar = "n tags of 2 bits, then int8, int16 and float32 numbers by tag"

    def __post_init__(self) -> None:
        if not isinstance(self.bound, float) or not SMALLEST <= self.bound <= 0.5:
            raise ConfigError(f"inceptionn: bound must be in [2^-14, 0.5], got {self.bound!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(
            variable_length=True,
            why_not="it sends nothing of a tensor whose entries are all below its bound",
            propagates_nonfinite=True,
        )

    @memoized
    def thresholds(self) -> tuple[int, int]:
        """Returns k and m: entries are sent from 2^-k on, and in 16 bits from 2^-m on."""
        k = math.ceil(-math.log2(self.bound))
        return k, k // 2

    @memoized
    def layout(self, numel: int) -> Layout:
        def check(parts: Parts) -> None:
            tags = unpack_bits(parts[0], 2, numel)
            for tag, part in enumerate(parts[1:], start=1):
                tagged = int((tags == tag).sum())
                if part.numel() != tagged:
                    raise WireError(f"part of {part.numel()} where {tagged} have the tag {tag}")

        tags = Field(torch.uint8, packed_numel(numel, 2))
        codes = (torch.int8, torch.int16, torch.float32)
        fields = (tags, *(Field(dtype, None) for dtype in codes))
        return Layout(fields, check, max_bytes(numel))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        k, m = self.thresholds()
        size = x.abs()
        # Written so that NaN has the tag of float32 entries.
        tags = sum(~(size < threshold) for threshold in (2.0**-k, 2.0**-m, 1.0))
        assert isinstance(tags, Tensor)
        small, middle = x[tags == 1] * 2 ** (m + 7), x[tags == 2] * 2**15
        return (
            pack_bits(tags, 2),
            small.round_().clamp_(-127, 127).to(torch.int8),
            middle.round_().clamp_(-32767, 32767).to(torch.int16),
            x[tags == 3],
        )

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        units = (2.0 ** -(self.thresholds()[1] + 7), 2.0**-15, 1.0)
        for packed, *codes in messages:
            tags = unpack_bits(packed, 2, out.numel())
            for tag, (code, unit) in enumerate(zip(codes, units, strict=True), start=1):
                place = torch.nonzero(tags == tag).view(-1)
                out.index_add_(0, place, code.to(out.dtype) * unit, alpha=weight)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the length of a typical message: three bits per entry beyond the tags."""
        numel = torch.Size(shape).numel()
        return packed_bytes(None, [self.layout(numel)]) + packed_numel(numel, 3)
