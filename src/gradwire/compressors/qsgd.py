"""QSGD: stochastic rounding to a few levels, per bucket."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._quantizer import Quantizer
from gradwire.errors import ConfigError
from gradwire.kernels.specs import RoundingSpec


@dataclass(frozen=True)
class QSGD(Quantizer):
    """Rounds each entry at random to one of the two nearest of 2^bits - 1 levels; unbiased.

    Levels are multiples of scale/s with s = 2^(bits-1) - 1, where the scale of a bucket is its
    largest magnitude (`norm=max`) or its Euclidean norm (`norm=l2`, as in the paper). The variance
    is at most b = min(d/4s², √d/s) of the squared norm for buckets of d. Only where b is below 1 is
    it a contraction too, and may go with a residual. `scaled` divides the message by 1 + b: then it
    is a contraction for any b, by 1/(1 + b), and no longer unbiased. NaN or infinity makes its
    bucket non-finite; a bucket of zeros decodes to zeros.
    """

    bits: int = 4
    bucket: int = 128
    norm: Literal["max", "l2"] = "max"
    scaled: bool = False

    examples: ClassVar = (
        {"bits": 4},
        {"bits": 2},
        {"bits": 8, "bucket": 512, "norm": "l2"},
        {"bits": 2, "scaled": True},
    )
    family: ClassVar = "quantisation"
    paper: ClassVar = "Alistarh et al. 2017, arXiv:1610.02132"
    message: ClassVar = "n codes of b bits, one float32 scale per bucket"

    def __post_init__(self) -> None:
        check_whole("qsgd", "bits", self.bits, 2, 8)
        check_whole("qsgd", "bucket", self.bucket, 1)
        if self.norm not in ("max", "l2"):
            raise ConfigError(f"qsgd: norm must be 'max' or 'l2', got {self.norm!r}")

    def variance(self) -> float:
        """Returns the bound on the squared error, relative to the squared norm."""
        levels = (1 << (self.bits - 1)) - 1
        return min(self.bucket / (4 * levels**2), math.sqrt(self.bucket) / levels)

    @memoized
    def traits(self) -> Traits:
        variance = self.variance()
        return Traits(
            unbiased=not self.scaled,
            contraction=self.scaled or variance < 1,
            why_not=f"its variance bound with bits={self.bits}, bucket={self.bucket} is "
            f"{variance:.3g}, not below 1 (use more bits, a smaller bucket, or scaled=true)",
            propagates_nonfinite=True,
            block=self.bucket,
        )

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        over = 1 + self.variance() if self.scaled else 1.0
        return RoundingSpec("stochastic", self.bucket, self.bits, self.norm, over)
