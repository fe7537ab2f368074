"""Argument types that the kernels of all backends share.

The threshold spec says which entries a sparsifier selects, the rounding spec how a quantizer
encodes a bucket, and the drift tensors are what the outer loop of local methods works on.
"""

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from gradwire.types import Key

ThresholdKind: TypeAlias = Literal["fixed", "sampled", "bisected", "excess", "normal"]


class ThresholdSpec(NamedTuple):
    """How a border is found, and how many entries may be chosen at most.

    `kernels/reference/thresholds.py` says what the kinds mean; "fixed" is a border that is known.
    """

    kind: ThresholdKind
    most: int = 0
    """Of more entries than this that reach the border, the largest are chosen; 0: all of them."""
    wanted: int = 0
    """How many should reach it; of "sampled", how many are enough."""
    border: float = 0.0
    """Of "fixed"."""
    key: Key = 0
    tried: int = 0
    top: int = 0
    """Of "sampled": how the sample is drawn, its length, and the rank in it to begin with."""
    shares: tuple[float, ...] = ()
    """Of "excess"."""
    spread: float = 0.0
    rounds: int = 0
    """Of "normal"."""


RoundingKind: TypeAlias = Literal["chance", "nearest", "e4m3", "e5m2", "tree", "power"]


class RoundingSpec(NamedTuple):
    """A rounding and the scale that goes with it; `kernels/reference/rounding.py` says how.

    - "chance" and "nearest": multiples of 1/levels of the scale, up or down by chance or nearest;
    - "e4m3" and "e5m2": 8-bit floating point, nearest, with the scale at its largest power of two;
    - "tree": the nearest of 127 levels in seven decades, and zero;
    - "power": a power of two, up or down by chance; the scale is the largest of them.
    """

    kind: RoundingKind
    bucket: int
    width: int = 8
    scale: Literal["max", "l2", "max16"] = "max"
    """The largest magnitude of a bucket, or its Euclidean norm, or the largest as a bfloat16."""
    over: float = 1.0
    """The scale that is told is that one divided by this (of "chance" and "nearest")."""

    @property
    def levels(self) -> int:
        """Levels on each side of zero that are multiples of one part of the scale, if any."""
        return (1 << (self.width - 1)) - 1 if self.kind in ("chance", "nearest") else 0

    @property
    def top(self) -> float:
        """What the scale itself becomes before it is rounded."""
        tops = {"e4m3": 2.0**8, "e5m2": 2.0**15, "tree": 1.0}
        return tops.get(self.kind, float(self.levels))

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers."""
        return self.kind in ("chance", "power")


class Drifted(NamedTuple):
    """Vectors, one a parameter in each list; all but `here` are float32, and all may be written."""

    here: list[Tensor]
    """Where the parameters are, in their own types."""
    base: list[Tensor]
    """Where they would be without the steps that have yet to be told."""
    anchor: list[Tensor]
    """Where all workers agree that they are."""
    drift: list[Tensor]
    """What is told on departure; on arrival the mean of it."""
