"""What settings lose of a gradient: as sampled where they were tried, and else as they go on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["choice", "rounding", "noise"]
"""choice: part of a gradient is said, and the rest waits. rounding: all is said coarsely, and what
is lost waits. noise: all is said coarsely and right on average, and nothing waits."""

POWER = 0.5
"""What is kept falls like this power of the setting until it is sampled: for gradients like
Laplace's it does so between 10 % and 1 % of the entries."""
BIT = 4.0
"""The squared error grows by this for a bit less."""
NEW = 0.5
"""The weight of a new sample beside what is known."""
FORGET = 0.99
"""What is left of an error that nobody has seen since the last sample: so all is tried again, the
sooner the less it lost."""
TINY = 1e-6


@dataclass
class Losses:
    """Squared errors, relative to all there was to say, by place on the ladder.

    A gradient that has become harder to say is so at all settings: they change together.
    """

    error: dict[int, float] = field(default_factory=dict)
    latest: int | None = None
    """Where the last sample was."""

    def add(self, place: int, error: float, kind: Kind) -> None:
        self.forget(place)
        if self.latest == place:
            old = self.error[place]
            error = NEW * error + (1 - NEW) * old
            for other in self.error.keys() - {place}:
                self.error[other] = _along(self.error[other], old, error, kind)
        self.error[place], self.latest = error, place

    def forget(self, place: int) -> None:
        """Another sample was not of these: all but the one at this place."""
        for other in self.error.keys() - {place}:
            self.error[other] *= FORGET

    def at(self, place: int, values: Sequence[float], kind: Kind) -> float:
        """The error at a place, or what it would be; `values` are the settings, by place."""
        if place in self.error:
            return self.error[place]
        near = min(self.error, key=lambda tried: (abs(tried - place), tried))
        known = self.error[near]
        if kind != "choice":
            return known * math.pow(BIT, values[near] - values[place])
        return 1 - min(1.0, (1 - known) * math.pow(values[place] / values[near], POWER))


def _along(error: float, old: float, new: float, kind: Kind) -> float:
    """An error whose neighbour goes from old to new."""
    if kind != "choice":
        return error * max(new, TINY) / max(old, TINY)
    return 1 - min(1.0, (1 - error) * max(1 - new, TINY) / max(1 - old, TINY))


def progress(error: float, kind: Kind) -> float:
    """What a step is worth beside one that loses nothing.

    Where what is lost waits, the share of the gradient's norm that arrives. Where it does not, what
    more variance leaves of a step.
    """
    if kind == "noise":
        return 1 / (1 + error)
    return math.sqrt(max(0.0, 1 - error))
