"""SIDCo: a threshold read off an exponential distribution that is fitted to the magnitudes."""

from dataclasses import dataclass
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

STEP = 0.25
"""What every stage but the last keeps of those before it."""


@dataclass(frozen=True)
class SIDCo(ThresholdSparsifier):
    """Sends the entries above a fitted threshold: about a `ratio` of all, and at most twice that.

    If magnitudes were exponential with mean m, a share d of them would exceed -m ln d. Gradients
    have other tails, so it goes in up to `stages` stages: each passes a quarter, and the next is
    fitted to the excess over the last threshold alone, where the tail is. No sorting, one pass
    a stage. The largest entry is always sent and no larger one stays behind than was sent: a
    contraction. Of more than twice the aim the largest are sent. (The paper moves the number of
    stages while it trains; here it stays.) Zeros are never sent, NaN and infinity first.
    """

    ratio: float
    stages: int = 3
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "stages": 1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Abdelmoniem et al. 2021, arXiv:2101.10761"

    def __post_init__(self) -> None:
        check_fraction("sidco", "ratio", self.ratio)
        check_whole("sidco", "stages", self.stages, 1, 16)
        check_format("sidco", self.values)

    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    def count(self, numel: int) -> int:
        return count_of(self.ratio, numel)

    def shares(self) -> list[float]:
        """What each stage keeps of those that the stage before it has kept."""
        shares: list[float] = []
        rest = self.ratio
        while len(shares) < self.stages - 1 and rest < STEP:
            shares.append(STEP)
            rest /= STEP
        return [*shares, rest]

    def aim(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        return ThresholdSpec("excess", 2 * self.count(numel), shares=tuple(self.shares()))
