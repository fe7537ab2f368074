"""A codebook of bin means: uniform bins over a few standard deviations, and the mean of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext, Layout, Parts
from gradwire.wire.codebook import add_bins, bins_layout, pack_bins


@dataclass(frozen=True)
class Codebook(OneRound):
    """Sends the bin of every entry, one of 2^bits uniform bins, and the mean of every bin.

    The bins are uniform and together `spread` standard deviations wide around the mean; the first
    and the last are open. Since an entry decodes to the mean of its bin, the squared norm of the
    message is removed from the error, and the boundary in the middle leaves at least 1/n of it for
    n entries: a contraction. Two bits behind a sparsifier are what SparseLoCo sends, eight over 12
    deviations what INTELLECT-1 sends. NaN or infinity anywhere makes all entries non-finite.
    """

    bits: int = 2
    spread: float = 6.0

    examples: ClassVar = ({"bits": 2}, {"bits": 8, "spread": 12.0})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Jaghouar et al. 2024, arXiv:2412.01152"
    message: ClassVar = "n codes of b bits, 2^b float32 means"

    def __post_init__(self) -> None:
        check_whole("codebook", "bits", self.bits, 1, 8)
        number = isinstance(self.spread, int | float) and not isinstance(self.spread, bool)
        if not number or not 0 < self.spread < float("inf"):
            raise ConfigError(f"codebook: spread must be positive, got {self.spread!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def layout(self, numel: int) -> Layout:
        return bins_layout(numel, self.bits)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return pack_bins(x, self._codes(x), self.bits)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        add_bins(out, messages, weight, self.bits)

    def _codes(self, x: Tensor) -> Tensor:
        """Returns the bin of every entry; all are in one where the deviation is not a number."""
        if not x.numel():
            return x.to(torch.int64)
        wide = x.double()
        mean = wide.mean()
        deviation = (wide - mean).square().mean().sqrt()
        bins = 1 << self.bits
        position = (wide - mean) / (deviation * (self.spread / bins))
        # Where all entries are equal the quotient is NaN, and any bin is exact.
        return (position.nan_to_num(0.0).floor() + bins // 2).clamp(0, bins - 1).to(torch.int64)
