"""4-bit floating point without a fraction (E3M0): a sign and a power of two per entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import bucket_count, pack_bits, packed_numel, unpack_bits

_LARGEST = 7
"""Level of the largest magnitude of a block; level 0 is zero, each other twice the one below."""


@dataclass(frozen=True)
class Fp4(OneRound):
    """Sends a sign and three bits of exponent per entry, and each block's largest magnitude.

    The levels are zero and that magnitude times 1, 1/2, ... to 1/64, of which an entry becomes the
    nearest: it is off by a third of itself at most down to 1/64 of the largest, and never by more
    than its own size, while the largest is exact. So it is a contraction; it is the format that
    Streaming DiLoCo sends. NaN or infinity makes its block non-finite.
    """

    block: int = 128

    examples: ClassVar = ({}, {"block": 32})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Douillard et al. 2025, arXiv:2501.18512"
    message: ClassVar = "n codes of 4 bits, one float32 scale per block"

    def __post_init__(self) -> None:
        check_whole("fp4", "block", self.block, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.block)

    @memoized
    def layout(self, numel: int) -> Layout:
        codes = Field(torch.uint8, packed_numel(numel, 4))
        return Layout((codes, Field(torch.float32, bucket_count(numel, self.block))))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        blocks = self._in_blocks(x)
        scales = blocks.abs().amax(dim=1)
        share = (blocks.abs() / scales.unsqueeze(1)).view(-1)[: x.numel()]
        # Zeros of a block of zeros have no share, and NaN has none either: their code is any.
        level = torch.bucketize(share.nan_to_num(0.0), _bounds(x.device))
        return pack_bits(level + 8 * (x < 0), 4), scales

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        for codes, scales in messages:
            values = _values(out.device)[unpack_bits(codes, 4, out.numel())]
            blocks = self._in_blocks(values) * (scales * weight).unsqueeze(1)
            out.add_(blocks.view(-1)[: out.numel()])

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Returns a row for every block, the last one filled with zeros."""
        return pad(x, (0, -x.numel() % self.block)).view(-1, self.block)


@cache
def _values(device: torch.device) -> Tensor:
    """Returns the value of every code as a share of the block's largest magnitude."""
    positive = [0.0, *(2.0 ** (level - _LARGEST) for level in range(1, _LARGEST + 1))]
    return torch.tensor([*positive, *(-value for value in positive)], device=device)


@cache
def _bounds(device: torch.device) -> Tensor:
    """Returns the middles between neighbouring levels."""
    levels = _values(torch.device("cpu"))[: _LARGEST + 1]
    return ((levels[1:] + levels[:-1]) / 2).to(device)
