"""Gaussian-k: a threshold from the normal distribution with the gradient's mean and deviation."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from gradwire.base import Traits, memoized
from gradwire.checks import check_positive_fraction, check_whole
from gradwire.compressors._sparsifier import (
    ThresholdSparsifier,
    ValueFormat,
    check_format,
    count_for_ratio,
)
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EncodeContext


@dataclass(frozen=True)
class GaussianK(ThresholdSparsifier):
    """Sends the entries above a threshold for normal entries: 2/3 to 4/3 of a `ratio` (measured).

    The threshold is |mean| + z std, where a normal variable is beyond ±z with the chance `ratio`.
    Gradients are not quite normal, so up to `rounds` times it is lowered if fewer than 2/3 of the
    target reach it, or raised if more than 4/3 do: by halves or 1.5 times until there is a bound on
    either side, then by bisection. (The paper has no bisection, and oscillates: 0.02 to 2 of the
    target.) With the 16 rounds of the default, of which 3 to 5 are needed on average, all of 120
    steps with a residual sent 0.67 to 1.33 of the target or of the nonzero entries, at ratios of
    0.1, 0.01 and 0.001, of 13 distributions from uniform to Cauchy and of the gradients of a net.
    No sorting, one pass per round. The largest entry is always sent and none that is kept back is
    larger than one sent: a contraction. Of more than twice the target, as among equal entries, the
    largest are sent. Zeros are never sent, NaN and infinity are sent first.
    """

    ratio: float
    rounds: int = 16
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "rounds": 0, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Shi et al. 2019, arXiv:1911.08772"

    def __post_init__(self) -> None:
        check_positive_fraction("gaussiank", "ratio", self.ratio)
        check_whole("gaussiank", "rounds", self.rounds, 0, 100)
        check_format("gaussiank", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def threshold_spec(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        count = self.count(numel)
        deviations = self._deviations()
        return ThresholdSpec("normal", 2 * count, count, deviations=deviations, rounds=self.rounds)

    @memoized
    def _deviations(self) -> float:
        """Returns the z beyond which a normal variable is with probability `ratio`."""
        return -NormalDist().inv_cdf(self.ratio / 2)
