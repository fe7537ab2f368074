"""Threshold: every entry above a fixed magnitude is sent, however many there are."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from gradwire.base import Traits, memoized
from gradwire.compressors._sparsifier import ThresholdSparsifier, ValueFormat, check_format
from gradwire.errors import ConfigError
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EncodeContext


@dataclass(frozen=True)
class Threshold(ThresholdSparsifier):
    """Sends the entries whose magnitude is above `value`, so the length of a message varies.

    No entry that is kept back is larger than `value`: with a residual each entry is sent as soon as
    it has grown beyond it, so the residual is bounded, which serves error feedback as a contraction
    does. Where nothing is above, nothing is sent. NaN and infinity always count as above.
    """

    value: float
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({"value": 0.01}, {"value": 1.0, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Dutta et al. 2020, arXiv:1911.08250"

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise ConfigError(f"threshold: value must be above 0, got {self.value!r}")
        check_format("threshold", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, variable_length=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        # Unknown before the gradient is; thresholds are usually set to pass about one percent.
        return min(numel, max(1, numel // 100))

    def threshold_spec(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        return ThresholdSpec("fixed", threshold=_next_float32(self.value))


@cache
def _next_float32(value: float) -> float:
    """Returns the first float32 above `value`, since kernels select magnitudes that reach it."""
    return float(torch.tensor(value).nextafter(torch.tensor(torch.inf)))
