"""One layer as Autopilot knows it: what it would say at each setting, and lose."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.control.ladder import Rung, is_whole
from laconic.control.losses import Kind, Losses


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
