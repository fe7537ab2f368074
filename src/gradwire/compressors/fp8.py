"""8-bit floating point, scaled per bucket so that nothing overflows."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._quantizer import Quantizer
from gradwire.errors import ConfigError
from gradwire.kernels.specs import RoundingSpec

Format = Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class Fp8(Quantizer):
    """Sends a byte per entry, e4m3 or e5m2, and the largest magnitude of each bucket.

    Entries are divided by that largest one and rounded to the nearest; it is exact itself. With
    three bits of fraction (e4m3) the others are off by at most 1/16 of themselves down to 2^-14 of
    the largest, with two (e5m2) by 1/8 down to 2^-29; below, steps are equal down to zero. No entry
    is off by more than itself: a contraction. NaN or infinity makes its bucket non-finite.
    """

    format: Format = "e4m3"
    bucket: int = 1024

    examples: ClassVar = ({}, {"format": "e5m2", "bucket": 128})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Micikevicius et al. 2022, arXiv:2209.05433"
    message: ClassVar = "n bytes, one float32 scale per bucket"

    def __post_init__(self) -> None:
        known = get_args(Format)
        if self.format not in known:
            raise ConfigError(f"fp8: format must be one of {[*known]}, got {self.format!r}")
        check_whole("fp8", "bucket", self.bucket, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.bucket)

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        return RoundingSpec(self.format, self.bucket)
