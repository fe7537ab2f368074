"""Argument types that the kernels of all backends share.

A `ThresholdSpec` describes the entries that a sparsifier selects, a `RoundingSpec` the encoding of
a quantizer, and `DriftTensors` holds the vectors that the outer loop of local methods works on.
"""

import math
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from gradwire.types import Key

ThresholdKind: TypeAlias = Literal["fixed", "sampled", "bisected", "excess", "normal"]


class ThresholdSpec(NamedTuple):
    """A rule to find a magnitude threshold, and the largest number of entries to select.

    `kernels/reference/thresholds.py` defines the kinds; "fixed" is a threshold known in advance.
    """

    kind: ThresholdKind
    max_count: int = 0
    """If more entries reach the threshold, the largest of them are selected; 0: no limit."""
    target_count: int = 0
    """Number of entries that should reach the threshold; for "sampled", the least number."""
    threshold: float = 0.0
    """The threshold of "fixed"."""
    key: Key = 0
    sample_size: int = 0
    sample_rank: int = 0
    """For "sampled": random key and size of the sample, and the rank in it to begin with."""
    stage_ratios: tuple[float, ...] = ()
    """For "excess": the share of entries that each stage keeps."""
    deviations: float = 0.0
    rounds: int = 0
    """For "normal": standard deviations above the mean, and the number of adjustments."""


RoundingKind: TypeAlias = Literal["stochastic", "nearest", "e4m3", "e5m2", "tree", "power"]


class RoundingSpec(NamedTuple):
    """A rounding to few bits and its scale, as `kernels/reference/rounding.py` defines them.

    - "stochastic" and "nearest": multiples of 1/levels of the scale;
    - "e4m3" and "e5m2": 8-bit floating point, nearest, with the scale at its largest power of two;
    - "tree": the nearest of 127 levels in seven decades, and zero;
    - "power": a power of two, stochastic; the scale is the largest of them.
    """

    kind: RoundingKind
    bucket: int
    width: int = 8
    scale: Literal["max", "l2", "max16"] = "max"
    """The largest magnitude of a bucket, its Euclidean norm, or the largest as a bfloat16."""
    scale_divisor: float = 1.0
    """The transmitted scale is divided by this ("stochastic" and "nearest" only)."""

    @property
    def levels(self) -> int:
        """Number of uniform levels on each side of zero; 0 if levels are not uniform."""
        return (1 << (self.width - 1)) - 1 if self.kind in ("stochastic", "nearest") else 0

    @property
    def scaled_max(self) -> float:
        """The number that a magnitude equal to the scale is mapped to before rounding."""
        tops = {"e4m3": 2.0**8, "e5m2": 2.0**15, "tree": 1.0}
        return tops.get(self.kind, float(self.levels))

    @property
    def largest_error(self) -> float:
        """Upper bound of an entry's rounding error, relative to the largest of its bucket."""
        others = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "tree": 0.0071, "power": 1.0}
        if self.kind in others:
            return others[self.kind]
        step = 1 / self.levels if self.levels else math.inf
        error = step / 2 if self.kind == "nearest" else step
        if self.scale == "l2":
            # The norm is at most so many times the largest.
            error *= math.sqrt(self.bucket)
        if self.scale == "max16":
            error += 2.0**-8
        return 1 - (1 - error) / self.scale_divisor


class DriftTensors(NamedTuple):
    """Lists with one vector per parameter; all but `params` are float32, and all may be written."""

    params: list[Tensor]
    """The parameters, in their own dtypes."""
    base: list[Tensor]
    """The parameters without the local steps that have not been sent yet."""
    anchor: list[Tensor]
    """The parameters that all workers agree on."""
    drift: list[Tensor]
    """The drift to be sent; when a mean is applied, that mean."""


class Moments(NamedTuple):
    """Two running means of a gradient, before a step and after it; all float32 of one length.

    The outputs may be the inputs themselves.
    """

    mean: Tensor
    square: Tensor
    mean_out: Tensor
    square_out: Tensor


class AdamSpec(NamedTuple):
    """The settings of Adam's update."""

    beta1: float
    beta2: float
    eps: float
    workers: int = 1
    """The square of the update's divisor is (square + (workers - 1) mean^2) / workers."""
