"""DGC's choice: nearly the largest entries, by a threshold that a sample suggests."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits
from gradwire.checks import check_fraction
from gradwire.compressors._sparsifier import (
    ThresholdSparsifier,
    ValueFormat,
    check_format,
    count_of,
)
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EncodeContext

ENOUGH = 0.8
"""Below this part of the aim the threshold is lowered."""


@dataclass(frozen=True)
class DGC(ThresholdSparsifier):
    """Sends the largest entries that a sampled threshold passes: at most k, a `ratio` of all.

    The threshold is that of the top-k of a random `sample` of the entries, at least 2/ratio of
    them. If it passes less than 0.8 k it is lowered by a fifth, ten times at most; of more than k
    the k largest are chosen among those that passed. So what is sent is always the top of the
    entries, as with top-k, only sometimes a few less of them: a contraction. Zeros are never sent,
    NaN and infinity first. The other half of the paper is the memory `momentum`.
    """

    ratio: float
    sample: float = 0.01
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    bears_zeros: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "sample": 0.1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Lin et al. 2018, arXiv:1712.01887"

    def __post_init__(self) -> None:
        check_fraction("dgc", "ratio", self.ratio)
        check_fraction("dgc", "sample", self.sample)
        check_format("dgc", self.values)

    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    def count(self, numel: int) -> int:
        return count_of(self.ratio, numel)

    def aim(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        count = self.count(numel)
        tried = math.ceil(min(numel, max(self.sample * numel, 2 / self.ratio)))
        top, enough = count_of(self.ratio, tried), math.ceil(ENOUGH * count)
        return ThresholdSpec("sampled", count, enough, key=ctx.own_key(), tried=tried, top=top)
