"""Error model: compression error of each layer at each setting, and the progress of a step.

Errors are sampled at settings in use and extrapolated to all others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gradwire.control._autopilot.candidates import Rung, is_whole

Kind: TypeAlias = Literal["choice", "rounding", "noise"]
"""choice: part of a gradient is said, and the rest waits. rounding: all is said coarsely, and what
is lost waits. noise: all is said coarsely and right on average, and nothing waits."""

LAG = 50
"""Steps that training falls behind if half of the norm arrives: (1/share - 1) times as many.

Measured: a character model with top-k of 10, 3, 1 and 0.3 % (shares of 0.86, 0.56, 0.31 and 0.17)
came to the same losses 12, 35, 105 and 190 steps later than a dense one, whether these were the
losses of step 100 or of step 300. That is 45 (1/share - 1)."""
BIT = 4.0
"""The squared error grows by this for a bit less, since the steps of rounding are twice as wide."""
NEW = 0.5
"""The weight of a new sample beside what is known: as much as of all before it."""
POWER = 0.5
"""What is kept grows like this power of the setting until it is sampled: of a gradient like
Laplace's, the largest 10 % keep 59 % and the largest 1 % keep 16 %, which is 0.57."""
FORGET = 0.99
"""What is left of the bad opinion of a setting that nobody has seen since the last sample: half of
it after 70, so that what was bad once costs one sample in 70 to be looked at again."""
TINY = 1e-6


@dataclass
class Losses:
    """Squared errors of one layer, relative to all there was to say, by place on the ladder.

    A gradient that has become harder to say is so at all settings: they change together.
    """

    error: dict[int, float] = field(default_factory=dict)
    latest: int | None = None
    """Where the last sample was."""
    energy: float = 0.0
    """All there was to say, as a sum of squares."""

    def sample(self, place: int, left: float, total: float, kind: Kind) -> None:
        """So much was left unsaid at a place; where all is said, nothing is to be learnt of it."""
        self.energy = NEW * total + (1 - NEW) * self.energy if self.energy else total
        self._forget(place, kind)
        if not is_whole(place):
            self._add(place, left / total, kind)

    def _add(self, place: int, error: float, kind: Kind) -> None:
        if self.latest == place:
            old = self.error[place]
            error = NEW * error + (1 - NEW) * old
            for other in self.error.keys() - {place}:
                self.error[other] = _along(self.error[other], old, error, kind)
        self.error[place], self.latest = error, place

    def _forget(self, place: int, kind: Kind) -> None:
        """Another sample was not of these: all but the one at this place."""
        for other in self.error.keys() - {place}:
            error = self.error[other]
            choice = 1 - min(1.0, (1 - error) / FORGET)
            self.error[other] = choice if kind == "choice" else error * FORGET

    def at(self, place: int, values: Sequence[float], kind: Kind) -> float:
        """The error at a place, or what it would be; `values` are the settings, by place.

        Of the largest entries, half as many keep half as much at least, which is what is expected.
        What says more loses no more, whatever it did when it was last seen.
        """
        if place in self.error:
            return min(error for tried, error in self.error.items() if tried >= place)
        near = min(self.error, key=lambda tried: (abs(tried - place), tried))
        known = self.error[near]
        if kind != "choice":
            return known * math.pow(BIT, values[near] - values[place])
        factor = values[place] / values[near]
        return 1 - min(1.0, (1 - known) * (factor if factor < 1 else math.pow(factor, POWER)))


def _along(error: float, old: float, new: float, kind: Kind) -> float:
    """An error whose neighbour goes from old to new."""
    if kind != "choice":
        return error * max(new, TINY) / max(old, TINY)
    return 1 - min(1.0, (1 - error) * max(1 - new, TINY) / max(1 - old, TINY))


def progress(error: float, kind: Kind, steps: int) -> float:
    """What a step is worth beside one that loses nothing, if so many are to follow.

    Where what is lost waits, it arrives after all: the run falls behind only once, and the more
    steps there are the less it matters. Where nothing waits, more variance takes its share of every
    step.
    """
    if kind == "noise":
        return 1 / (1 + error)
    share = math.sqrt(max(1 - error, TINY))
    return 1 / (1 + (1 / share - 1) * LAG / steps)


class Layer:
    """Messages by place on the ladder, and samples of what they lose."""

    def __init__(self, shape: Sequence[int], rungs: Sequence[Rung]) -> None:
        self.shape = list(shape)
        self.elements = math.prod(shape)
        self.lengths = [rung.compressor.nbytes(self.shape) for rung in rungs]
        self.losses = Losses()
        self._values = [rung.value for rung in rungs]

    def effective(self, place: int) -> int:
        """The place itself, or dense where that is no longer."""
        return 0 if self.lengths[place] >= self.lengths[0] else place

    def open_to(self, here: int) -> list[int]:
        """Places that are worth a thought: each says less than those before it.

        No more than one is beyond all whose losses are known, and none where nothing is known.
        """
        here = self.effective(here)
        known = self.losses.error
        if not known:
            return [here]
        limit = max(here, *known)
        useful: list[int] = []
        for place, length in enumerate(self.lengths):
            if all(length < self.lengths[other] for other in useful):
                useful.append(place)
            if useful[-1] > limit:
                break
        # Where it is now has yet to be seen.
        unseen = not is_whole(here) and here not in known
        return [place for place in useful if not (unseen and place > limit)]

    def lost(self, place: int, kind: Kind) -> float:
        """What a step leaves unsaid, as a sum of squares."""
        place = self.effective(place)
        if is_whole(place) or not self.losses.error:
            return 0.0
        return self.losses.energy * self.losses.at(place, self._values, kind)

    def save(self) -> dict[str, object]:
        error = {str(place): error for place, error in self.losses.error.items()}
        losses = {**vars(self.losses), "error": error}
        return {"shape": list(self.shape), "losses": losses}


def load_layer(saved: Mapping[str, Any], rungs: Sequence[Rung]) -> Layer:
    layer = Layer(saved["shape"], rungs)
    error = {int(place): error for place, error in saved["losses"]["error"].items()}
    layer.losses = Losses(**{**saved["losses"], "error": error})
    return layer
