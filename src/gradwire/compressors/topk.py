"""Top-k: only the largest entries are sent; the rest stays in the residual."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire import kernels
from gradwire.base import Traits, memoized
from gradwire.checks import check_positive_fraction
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat, check_format, count_for_ratio
from gradwire.types import EFInput, EncodeContext


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the largest-magnitude fraction `ratio`: packed positions, `values` fp32|bf16|fp16.

    k entries of n hold at least k/n of the squared norm, so the squared error is at most 1 - k/n of
    it (and a little for the format). The selection is exact: ties go to the lower position, on
    every device.
    """

    ratio: float
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Aji & Heafield 2017, arXiv:1704.05021"

    def __post_init__(self) -> None:
        check_positive_fraction("topk", "ratio", self.ratio)
        check_format("topk", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        return kernels.on(ef.grad.device).select_largest(ef, self.count(ef.grad.numel()))
