"""How the entries of a bucket become codes: what the rounding kernels of all backends are told."""

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["chance", "nearest", "e4m3", "e5m2", "tree", "power"]


class Rule(NamedTuple):
    """A rounding and the scale that goes with it; `kernels/reference/rounding.py` says how.

    - "chance" and "nearest": multiples of 1/levels of the scale, up or down by chance or nearest;
    - "e4m3" and "e5m2": 8-bit floating point, nearest, with the scale at its largest power of two;
    - "tree": the nearest of 127 levels in seven decades, and zero;
    - "power": a power of two, up or down by chance; the scale is the largest of them.
    """

    kind: Kind
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
