"""A codebook of bin means: even bins over a few standard deviations, and the mean of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import OneRound, Traits
from laconic.errors import ConfigError
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.bits import pack_bits, packed_numel, unpack_bits


@dataclass(frozen=True)
class Codebook(OneRound):
    """Sends for every entry the number of its bin, one of 2^bits, and for every bin its mean.

    The bins are even and together `spread` standard deviations wide, the mean of all in the middle;
    the first and the last are open. Since a bin is said by its mean, what is said has the norm that
    the error lacks, and the border in the middle leaves at least 1/n of it for n entries: a
    contraction. Two bits behind a sparsifier are what SparseLoCo sends, eight over 12 deviations
    what INTELLECT-1 does. NaN or infinity anywhere makes all not finite.
    """

    bits: int = 2
    spread: float = 6.0

    examples: ClassVar = ({"bits": 2}, {"bits": 8, "spread": 12.0})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Jaghouar et al. 2024, arXiv:2412.01152"

    def __post_init__(self) -> None:
        check_whole("codebook", "bits", self.bits, 1, 8)
        number = isinstance(self.spread, int | float) and not isinstance(self.spread, bool)
        if not number or not 0 < self.spread < float("inf"):
            raise ConfigError(f"codebook: spread must be positive, got {self.spread!r}")

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        codes = Field(torch.uint8, packed_numel(numel, self.bits))
        return Layout((codes, Field(torch.float32, self._bins(numel))))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        bins = self._bins(x.numel())
        codes = self._codes(x)
        # Summed in float64, where the order of a card's additions is lost in the rounding to
        # float32, and large entries do not leave the range.
        sums = x.new_zeros(bins, dtype=torch.float64).scatter_add_(0, codes, x.double())
        counts = torch.zeros_like(sums).scatter_add_(0, codes, torch.ones_like(x).double())
        return pack_bits(codes, self.bits), (sums / counts.clamp(min=1)).to(x.dtype)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        for codes, means in messages:
            out.add_((means * weight)[unpack_bits(codes, self.bits, out.numel())])

    def _bins(self, numel: int) -> int:
        return 1 << self.bits if numel else 0

    def _codes(self, x: Tensor) -> Tensor:
        """The bin of every entry; all are in one where no number says how they are spread."""
        if not x.numel():
            return x.to(torch.int64)
        wide = x.double()
        mean = wide.mean()
        deviation = (wide - mean).square().mean().sqrt()
        bins = 1 << self.bits
        place = (wide - mean) / (deviation * (self.spread / bins))
        # Where all are equal the quotient is none, and any bin says it exactly.
        return (place.nan_to_num(0.0).floor() + bins // 2).clamp(0, bins - 1).to(torch.int64)
