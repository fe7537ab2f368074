"""Half precision: 16 bits per entry, saturating at 65504."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.base import Traits, memoized
from gradwire.compressors._cast import Cast


@dataclass(frozen=True)
class Fp16(Cast):
    """Rounds to float16; finite entries beyond its range become its largest number.

    Relative error at most 2^-11 between 6e-5 and 65504. Ranks divide before the sum, so a mean up
    to 61440 does not overflow; beyond, rounding can make it infinite. NaN and infinity are kept.
    """

    dtype: ClassVar = torch.float16
    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "IEEE 754 binary16"

    @memoized
    def traits(self) -> Traits:
        return Traits(
            summable=True,
            rounds_sums=True,
            contraction=True,
            suits_small_tensors=True,
            propagates_nonfinite=True,
        )
