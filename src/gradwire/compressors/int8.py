"""Block-wise 8-bit integers: nearest rounding, one scale per block."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._quantizer import Quantizer
from gradwire.kernels.specs import RoundingSpec


@dataclass(frozen=True)
class Int8(Quantizer):
    """Sends each entry as the nearest of 255 levels, and each block's largest magnitude.

    Levels are the multiples of 1/127 of that magnitude, so an entry is off by 1/254 of it at most,
    and never by more than its own size; the largest is exact. So it is a contraction. ZeRO++
    gathers weights in this way. A block with NaN or infinity becomes NaN.
    """

    block: int = 256

    examples: ClassVar = ({}, {"block": 32})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Wang et al. 2023, arXiv:2306.10209"
    message: ClassVar = "n codes of 8 bits, one float32 scale per block"

    def __post_init__(self) -> None:
        check_whole("int8", "block", self.block, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.block)

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        return RoundingSpec("nearest", self.block, 8)
