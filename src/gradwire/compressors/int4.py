"""Block-wise 4-bit integers: nearest rounding, one scale per block."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._quantizer import Quantizer
from gradwire.errors import ConfigError
from gradwire.kernels.specs import RoundingSpec

SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Int4(Quantizer):
    """Sends each entry as the nearest of 15 levels, and each block's largest magnitude.

    Levels are the multiples of a seventh of that magnitude, so an entry is off by a fourteenth of
    it at most, and never by more than its own size; the largest is exact (within 2^-8 of it with
    `scale=bf16`, which holds magnitudes up to 3.39e38). So it is a contraction: with a residual,
    rounding errors are sent later, as in LoCo. A block with NaN or infinity becomes NaN.
    """

    block: int = 128
    scale: Literal["fp32", "bf16"] = "fp32"

    examples: ClassVar = ({}, {"block": 32, "scale": "bf16"})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Xie et al. 2024, arXiv:2407.04480"
    message: ClassVar = "n codes of 4 bits, one scale (float32 or bf16) per block"

    def __post_init__(self) -> None:
        check_whole("int4", "block", self.block, 1)
        if self.scale not in SCALES:
            raise ConfigError(f"int4: scale must be one of {[*SCALES]}, got {self.scale!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.block)

    @memoized
    def rounding_spec(self) -> RoundingSpec:
        return RoundingSpec("nearest", self.block, 4, "max16" if self.scale == "bf16" else "max")
