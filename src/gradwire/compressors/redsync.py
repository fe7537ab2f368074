"""RedSync: nearly the largest entries, by a threshold found by bisection."""

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


@dataclass(frozen=True)
class RedSync(ThresholdSparsifier):
    """Sends the k to 2k entries above a threshold found by bisection, k a `ratio` of all.

    The threshold lies between the mean and the largest magnitude and is found by bisection (the
    paper's trimmed top-k), which needs only counting, no sorting. Where fewer than k entries reach
    the mean, those are sent; where magnitudes are too similar to separate, the first 2k of the
    largest. The largest entry is always sent and none that is kept back is larger than one sent, so
    the squared error is below 1: at most 1 - ratio where k are sent. Zeros are never sent, NaN and
    infinity first. The paper also quantises: see pipelines.
    """

    ratio: float
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    tolerates_zero_padding: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Fang et al. 2019, arXiv:1808.04357"

    def __post_init__(self) -> None:
        check_positive_fraction("redsync", "ratio", self.ratio)
        check_format("redsync", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def threshold_spec(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        count = self.count(numel)
        return ThresholdSpec("bisected", 2 * count, count)
