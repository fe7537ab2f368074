"""SketchML's quantile buckets: as many entries in each bin, and the mean of each bin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import OneRound, Traits
from gradwire.checks import check_whole
from gradwire.types import EncodeContext, Layout, Parts
from gradwire.wire.codebook import add_bins, bin_count, bins_layout, pack_bins


@dataclass(frozen=True)
class SketchML(OneRound):
    """Sends for every entry the number of its bin, one of 2^bits, and for every bin its mean.

    The borders of the bins are quantiles, so bins are narrow where entries are many. They come from
    a random sample of `sample` entries, with no sort of all; the means are those of all entries, so
    the sum of each bin is exact however poor the sample. One border is zero: no bin mixes
    signs, hence a contraction, and what is said never has the wrong sign. Where many entries are
    zero they have a bin of their own, and stay zero. NaN or infinity spoils its bin.
    """

    bits: int = 6
    sample: int = 8192

    examples: ClassVar = ({"bits": 6}, {"bits": 2, "sample": 500}, {"bits": 8})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Jiang et al. 2018, SIGMOD"

    def __post_init__(self) -> None:
        check_whole("sketchml", "bits", self.bits, 1, 8)
        check_whole("sketchml", "sample", self.sample, 1)

    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    def layout(self, numel: int) -> Layout:
        return bins_layout(numel, self.bits)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        borders = self._borders(x, bin_count(x.numel(), self.bits), ctx)
        return pack_bins(x, torch.bucketize(x, borders), self.bits)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        add_bins(out, messages, weight, self.bits)

    def _borders(self, x: Tensor, bins: int, ctx: EncodeContext) -> Tensor:
        """The upper borders of all bins but the last: ascending, and one of them is zero."""
        count = min(x.numel(), self.sample)
        if not count:
            return x
        places = kernels.at(x).strata(ctx.own_key(), x.numel(), count, x.device)
        sample = x[places].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bin_number = torch.arange(1, bins, device=x.device)
        borders = sample.sort().values[(bin_number * count // bins - 1).clamp(min=0)]
        # The one nearest to zero can move there and all stay in order.
        borders.index_fill_(0, borders.abs().argmin().view(1), 0.0)
        # Several at zero: the earlier ones go just below, and the bin between holds the zeros.
        again = (borders == 0) & (borders.roll(-1) == 0)
        again &= bin_number < bins - 1
        return torch.where(again, -torch.finfo(x.dtype).tiny, borders)
