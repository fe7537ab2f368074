"""Natural compression: powers of two, one byte each."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits, memoized
from gradwire.compressors._quantizer import Quantizer
from gradwire.kernels.specs import RoundingSpec

BUCKET = 1024
"""Number of entries that share the largest power, which costs 1/32 of a bit per entry."""


@dataclass(frozen=True)
class Natural(Quantizer):
    """Rounds each entry to a power of two, up or down at random so that it is unbiased.

    It sends the sign and 7 bits of exponent, relative to the largest of 1024 consecutive entries.
    An entry x between 2^e and 2^(e+1) is rounded up with probability x/2^e - 1; the variance is at
    most 1/8 of its square (at 4/3 of a power), so it is a contraction too. Powers of two are exact.
    It is biased at two edges only: entries below 2^-124 of the largest become zero, and those above
    2^127 are rounded down. Infinity stays infinity; NaN arrives as infinity.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Horváth et al. 2019, arXiv:1905.10988"
    message: ClassVar = "n bytes, one float32 scale (a power of two) per 1024 entries"

    @memoized
    def traits(self) -> Traits:
        return Traits(unbiased=True, contraction=True, block=BUCKET)

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        return RoundingSpec("power", BUCKET)
