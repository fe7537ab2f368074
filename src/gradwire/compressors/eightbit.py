"""8-bit dynamic tree: a byte per entry, fine near the largest and coarse over seven decades."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._quantizer import Quantizer
from gradwire.kernels.specs import RoundingSpec


@dataclass(frozen=True)
class EightBit(Quantizer):
    """Sends a byte per entry, the nearest of 255 levels, and the largest magnitude of each bucket.

    After the sign, the zero bits before the first one count the decades below the largest; the k
    bits after it divide that decade into 2^k equal steps. A level is the upper end of its step, so
    the largest entry of a bucket is exact; the others are off by at most 0.71 % of it, and down to
    a tenth of it by at most 7 % of themselves. Zero is a level, so no entry is off by more than
    itself: a contraction. NaN or infinity makes its bucket non-finite.
    """

    bucket: int = 1024

    examples: ClassVar = ({}, {"bucket": 128})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Dettmers 2015, arXiv:1511.04561"
    message: ClassVar = "n bytes, one float32 scale per bucket"

    def __post_init__(self) -> None:
        check_whole("eightbit", "bucket", self.bucket, 1)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.bucket)

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        return RoundingSpec("tree", self.bucket)
