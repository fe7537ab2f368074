"""3LC: three levels per entry, and runs of zeros in a single byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.layout import max_bytes, packed_bytes
from gradwire.wire.ternary import ALL_ZERO, LARGEST, pack_trits, packed_trits, unpack_trits

LONGEST = 255 - LARGEST + 1
"""Longest run: a byte above LARGEST encodes a run of 2 to 14 bytes of five zeros each."""


@dataclass(frozen=True)
class ThreeLC(OneRound):
    """Sends each entry as the nearest of -M, 0 and M, five to a byte, with run-length coded zeros.

    M is `sparsity` (at least 1, below 2) times the largest magnitude: entries up to M/2 become
    zero, so a larger sparsity gives more zeros. A run of 2 to 14 bytes of zeros takes one byte,
    hence the length of a message varies, from 0.12 to 1.6 bits per entry. No entry is off by more
    than its own size, and the largest, m, by (sparsity - 1) m: a contraction, to go with a
    residual. NaN or infinity anywhere (or M beyond float32) makes the whole tensor non-finite.
    """

    sparsity: float = 1.0

    examples: ClassVar = ({}, {"sparsity": 1.75})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Lim, Andersen & Kaminsky 2018, arXiv:1802.07389"
    message: ClassVar = "scale as float32; trits with run-length coded zeros"

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
        if not number or not 1 <= self.sparsity < 2:
            raise ConfigError(f"threelc: sparsity must be in [1, 2), got {self.sparsity!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    @memoized
    def layout(self, numel: int) -> Layout:
        def check(parts: Parts) -> None:
            total = int(run_lengths(parts[1]).sum())
            if total != packed_trits(numel):
                raise WireError(f"message holds {total} bytes of trits of a tensor of {numel}")

        fields = (Field(torch.float32, 1), Field(torch.uint8, None))
        return Layout(fields, check, max_bytes(numel))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        largest = x.abs().amax().view(1) if x.numel() else x.new_zeros(1)
        scale = largest * self.sparsity
        # Where all is zero or not finite the quotient is NaN; the scale distinguishes the two.
        trits = (x / scale).round_().nan_to_num_(0.0).clamp_(-1, 1)
        return scale, shorten(pack_trits(trits))

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        for scale, coded in messages:
            trits = unpack_trits(lengthen(coded, packed_trits(out.numel())), out.numel())
            out.add_(trits.to(out.dtype) * scale, alpha=weight)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the greatest length of a message: without any run of zeros."""
        numel = torch.Size(shape).numel()
        longest = torch.empty(packed_trits(numel), dtype=torch.uint8, device="meta")
        scale = torch.empty(1, device="meta")
        return packed_bytes([(scale, longest)], [self.layout(numel)])


def shorten(packed: Tensor) -> Tensor:
    """Run-length encodes trits: every run of up to LONGEST bytes ALL_ZERO becomes one byte."""
    found: tuple[Tensor, Tensor] = torch.unique_consecutive(packed, return_counts=True)
    byte, count = found
    zeros = byte == ALL_ZERO
    pieces = torch.where(zeros, (count + LONGEST - 1) // LONGEST, count)
    # All pieces of a run but the last have the greatest length.
    coded = byte.masked_fill(zeros, 255).repeat_interleave(pieces)
    length = (count - 1) % LONGEST + 1
    last = torch.where(length == 1, ALL_ZERO, LARGEST - 1 + length).to(torch.uint8)
    coded[pieces.cumsum(0) - 1] = torch.where(zeros, last, byte)
    return coded


def run_lengths(coded: Tensor) -> Tensor:
    """Returns how many bytes of trits each byte encodes."""
    return torch.clamp(coded.long() - (LARGEST - 1), min=1)


def lengthen(coded: Tensor, count: int) -> Tensor:
    """Run-length decodes to `count` bytes of trits."""
    byte = coded.masked_fill(coded > LARGEST, ALL_ZERO)
    return byte.repeat_interleave(run_lengths(coded), output_size=count)
