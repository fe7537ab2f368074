"""SketchML's quantile buckets: bins with equally many entries, and the mean of each bin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.types import EncodeContext, Layout, Parts
from gradwire.wire.codebook import add_bins, bin_count, bins_layout, pack_bins


@dataclass(frozen=True)
class SketchML(OneRound):
    """Sends the bin of every entry, one of 2^bits quantile bins, and the mean of every bin.

    The boundaries of the bins are quantiles, so bins are narrow where entries are dense. They come
    from a random sample of `sample` entries, without a full sort; the means are those of all
    entries, so the sum of each bin is exact however poor the sample. One boundary is zero: no bin
    mixes signs, hence it is a contraction, and signs are always right. Where many entries are zero
    they have a bin of their own, and stay zero. NaN or infinity makes its bin non-finite.
    """

    bits: int = 6
    sample: int = 8192

    examples: ClassVar = ({"bits": 6}, {"bits": 2, "sample": 500}, {"bits": 8})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Jiang et al. 2018, SIGMOD"
    message: ClassVar = "n codes of b bits, 2^b float32 means"

    def __post_init__(self) -> None:
        check_whole("sketchml", "bits", self.bits, 1, 8)
        check_whole("sketchml", "sample", self.sample, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def layout(self, numel: int) -> Layout:
        return bins_layout(numel, self.bits)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        boundaries = self._boundaries(x, bin_count(x.numel(), self.bits), ctx)
        return pack_bins(x, torch.bucketize(x, boundaries), self.bits)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        add_bins(out, messages, weight, self.bits)

    def _boundaries(self, x: Tensor, bins: int, ctx: EncodeContext) -> Tensor:
        """Returns the upper boundaries of all bins but the last: ascending, one of them zero."""
        count = min(x.numel(), self.sample)
        if not count:
            return x
        sample_positions = kernels.on(x.device).strata(ctx.own_key(), x.numel(), count, x.device)
        sample = x[sample_positions].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bin_number = torch.arange(1, bins, device=x.device)
        boundaries = sample.sort().values[(bin_number * count // bins - 1).clamp(min=0)]
        # Moving the one nearest to zero to zero keeps them in order.
        boundaries.index_fill_(0, boundaries.abs().argmin().view(1), 0.0)
        # If several are zero, all but the last move just below, and the bin between holds zeros.
        again = (boundaries == 0) & (boundaries.roll(-1) == 0)
        again &= bin_number < bins - 1
        return torch.where(again, -torch.finfo(x.dtype).tiny, boundaries)
