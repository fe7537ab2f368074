"""No compression: the dense mean, through the code path of all other methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.base import Traits, memoized
from gradwire.compressors._cast import Cast


@dataclass(frozen=True)
class NoCompression(Cast):
    """Sends the float32 entries as they are."""

    dtype: ClassVar = torch.float32
    examples: ClassVar = ({},)
    family: ClassVar = "dense"
    paper: ClassVar = "the dense baseline"

    @memoized
    def traits(self) -> Traits:
        return Traits(
            summable=True,
            unbiased=True,
            contraction=True,
            exact=True,
            suits_small_tensors=True,
            propagates_nonfinite=True,
        )
