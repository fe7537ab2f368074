"""Which entries a threshold is to let pass: what the choosing kernels of all backends are told."""

from typing import Literal, NamedTuple, TypeAlias

from laconic.types import Key

Kind: TypeAlias = Literal["fixed", "sampled", "bisected", "excess", "normal"]


class Aim(NamedTuple):
    """How a border is found, and how many entries may be chosen at most.

    `kernels/reference/borders.py` says what the kinds mean; "fixed" is a border that is known.
    """

    kind: Kind
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
