"""Brain float: 16 bits per entry with the range of float32."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.base import Traits, memoized
from gradwire.compressors._cast import Cast


@dataclass(frozen=True)
class Bf16(Cast):
    """Rounds to bfloat16: relative error at most 2^-8 up to 3.39e38. Works on gloo too."""

    dtype: ClassVar = torch.bfloat16
    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Kalamkar et al. 2019, arXiv:1905.12322"

    @memoized
    def traits(self) -> Traits:
        return Traits(
            summable=True,
            rounds_sums=True,
            contraction=True,
            suits_small_tensors=True,
            propagates_nonfinite=True,
        )
