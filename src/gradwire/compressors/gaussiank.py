"""Gaussian-k: a threshold read off the normal distribution with the gradient's mean and spread."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from gradwire.base import Traits
from gradwire.checks import check_fraction, check_whole
from gradwire.compressors._sparsifier import (
    ThresholdSparsifier,
    ValueFormat,
    check_format,
    count_of,
)
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EncodeContext


@dataclass(frozen=True)
class GaussianK(ThresholdSparsifier):
    """Sends the entries above a threshold for normal entries: about a `ratio`, at most twice that.

    The threshold is |mean| + z std, where a normal variable is beyond ±z with the chance `ratio`.
    Gradients are not quite normal, so up to `rounds` times it is halved if it passes less than 2/3
    of the aim, or taken times 1.5 if more than 4/3. No sorting, one pass a round. The largest
    entry is always sent and no larger one stays behind than was sent: a contraction. Of more than
    twice the aim the largest are sent. Zeros are never sent, NaN and infinity first.
    """

    ratio: float
    rounds: int = 4
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "rounds": 0, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Shi et al. 2019, arXiv:1911.08772"

    def __post_init__(self) -> None:
        check_fraction("gaussiank", "ratio", self.ratio)
        check_whole("gaussiank", "rounds", self.rounds, 0, 100)
        check_format("gaussiank", self.values)

    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    def count(self, numel: int) -> int:
        return count_of(self.ratio, numel)

    def aim(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        count = self.count(numel)
        spread = -NormalDist().inv_cdf(self.ratio / 2)
        return ThresholdSpec("normal", 2 * count, count, spread=spread, rounds=self.rounds)
