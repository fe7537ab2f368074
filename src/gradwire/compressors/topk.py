"""Top-k: only the largest entries are said; the rest waits in the residual."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire import kernels
from gradwire.base import Traits
from gradwire.checks import check_fraction
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat, check_format, count_of
from gradwire.types import EFInput, EncodeContext


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the `ratio` largest-magnitude entries: packed positions, and `values` fp32|bf16|fp16.

    They hold at least that ratio of the squared norm, so the squared error is at most 1 - ratio of
    it (and a little for the format). Exact: of equal magnitudes the first come first, everywhere.
    """

    ratio: float
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Aji & Heafield 2017, arXiv:1704.05021"

    def __post_init__(self) -> None:
        check_fraction("topk", "ratio", self.ratio)
        check_format("topk", self.values)

    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    def count(self, numel: int) -> int:
        return count_of(self.ratio, numel)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        return kernels.at(ef.grad).largest(ef, self.count(ef.grad.numel()))
