"""Natural compression: powers of two, a byte each."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits
from gradwire.compressors._quantizer import Quantizer
from gradwire.kernels.specs import RoundingSpec

BUCKET = 1024
"""So many entries share the largest power, which costs 1/32 of a bit an entry."""


@dataclass(frozen=True)
class Natural(Quantizer):
    """Rounds each entry to a power of two, up or down so that its expectation is exact.

    Sent are the sign and 7 bits of exponent, counted down from the largest of 1024 neighbours. An
    entry between 2^e and 2^(e+1) goes up with the chance of its place between them; the variance
    is at most 1/8 of its square (at 4/3 of a power), so it is a contraction too. Powers of two are
    exact. Only at two edges is the expectation not exact: entries below 2^-124 of the largest
    become zero, and those above 2^127 go down. Infinity stays itself; NaN arrives as infinity.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Horváth et al. 2019, arXiv:1905.10988"

    def traits(self) -> Traits:
        return Traits(unbiased=True, contraction=True)

    def rule(self) -> RoundingSpec:
        return RoundingSpec("power", BUCKET)
