"""DGC's selection: nearly the largest entries, by a threshold estimated from a sample."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits, memoized
from gradwire.checks import check_positive_fraction
from gradwire.compressors._sparsifier import (
    ThresholdSparsifier,
    ValueFormat,
    check_format,
    count_for_ratio,
)
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EncodeContext

ENOUGH = 0.8
"""Share of k below which the threshold is lowered."""


@dataclass(frozen=True)
class DGC(ThresholdSparsifier):
    """Sends the entries above a threshold estimated from a sample: at most k, a `ratio` of all.

    The threshold is that of the top-k of a random `sample` of the entries, at least 2/ratio of
    them. If fewer than 0.8 k entries reach it, it is lowered by a fifth, at most ten times; of more
    than k the k largest are selected. So the entries sent are always the largest, as with top-k,
    only sometimes a few fewer: a contraction. Zeros are never sent, NaN and infinity first. The
    other half of the paper is the memory `momentum`.
    """

    ratio: float
    sample: float = 0.01
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    tolerates_zero_padding: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "sample": 0.1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Lin et al. 2018, arXiv:1712.01887"

    def __post_init__(self) -> None:
        check_positive_fraction("dgc", "ratio", self.ratio)
        check_positive_fraction("dgc", "sample", self.sample)
        check_format("dgc", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def threshold_spec(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        count = self.count(numel)
        sample_size = math.ceil(min(numel, max(self.sample * numel, 2 / self.ratio)))
        sample_rank, enough = count_for_ratio(self.ratio, sample_size), math.ceil(ENOUGH * count)
        return ThresholdSpec(
            "sampled",
            count,
            enough,
            key=ctx.own_key(),
            sample_size=sample_size,
            sample_rank=sample_rank,
        )
