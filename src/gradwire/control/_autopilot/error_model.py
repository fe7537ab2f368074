"""Error model: compression error of each layer at each setting, and the progress of a step.

Errors are sampled at settings in use and extrapolated to all others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gradwire.control._autopilot.candidates import GridPoint, is_uncompressed

ErrorKind: TypeAlias = Literal["selection", "rounding", "noise"]
"""selection: part of a gradient is sent, the rest stays in the residual. rounding: all entries are
sent coarsely, the error stays in the residual. noise: all entries are sent coarsely and without
bias, and there is no residual."""

LAG_STEPS = 50
"""Steps that training falls behind if half of the norm arrives: (1/share - 1) times as many.

Measured: a character model with top-k of 10, 3, 1 and 0.3 % (shares of 0.86, 0.56, 0.31 and 0.17)
reached the same losses 12, 35, 105 and 190 steps later than a dense one, on average over the
losses of steps 100 to 300. That is 45 (1/share - 1); 50 is cautious."""
ERROR_PER_BIT = 4.0
"""The squared error grows by this factor for one bit less, which doubles the rounding step."""
SAMPLE_WEIGHT = 0.5
"""The weight of a new sample in the moving average."""
KEPT_EXPONENT = 0.5
"""The kept energy grows like this power of the setting until it is sampled: of a Laplacian
gradient, the largest 10 % keep 59 % and the largest 1 % keep 16 %, which is 0.57."""
FORGET = 0.99
"""Factor by which the error of an unused setting shrinks per sample elsewhere: half is left after
70, so that trying a bad setting again costs one sample in 70."""
TINY = 1e-6


@dataclass
class RelativeErrors:
    """Squared errors of one layer, relative to gradient plus residual, by grid index.

    A gradient that has become harder to compress is so at all settings: their errors are scaled
    together.
    """

    errors: dict[int, float] = field(default_factory=dict)
    last_sampled: int | None = None
    """Grid index of the last sample."""
    energy: float = 0.0
    """Sum of squares of gradient plus residual."""

    def add_sample(self, index: int, error: float, total: float, kind: ErrorKind) -> None:
        """Adds a measured squared error; at uncompressed settings only the energy is used."""
        average = SAMPLE_WEIGHT * total + (1 - SAMPLE_WEIGHT) * self.energy
        self.energy = average if self.energy else total
        self._forget(index, kind)
        if not is_uncompressed(index):
            self._update(index, error / total, kind)

    def _update(self, index: int, error: float, kind: ErrorKind) -> None:
        if self.last_sampled == index:
            old = self.errors[index]
            error = SAMPLE_WEIGHT * error + (1 - SAMPLE_WEIGHT) * old
            for other in self.errors.keys() - {index}:
                self.errors[other] = _scale(self.errors[other], old, error, kind)
        self.errors[index], self.last_sampled = error, index

    def _forget(self, index: int, kind: ErrorKind) -> None:
        """Lowers the errors of all settings but the sampled one, so that they are tried again."""
        for other in self.errors.keys() - {index}:
            error = self.errors[other]
            selection = 1 - min(1.0, (1 - error) / FORGET)
            self.errors[other] = selection if kind == "selection" else error * FORGET

    def predict(self, index: int, values: Sequence[float], kind: ErrorKind) -> float:
        """Returns the measured or extrapolated error; `values` are the settings by grid index.

        Half as many of the largest entries keep at least half as much, which is what is predicted.
        A setting that sends more has no larger error than one that sends less, whatever was
        measured.
        """
        if index in self.errors:
            return min(error for tried, error in self.errors.items() if tried >= index)
        nearest = min(self.errors, key=lambda tried: (abs(tried - index), tried))
        known = self.errors[nearest]
        if kind != "selection":
            return known * math.pow(ERROR_PER_BIT, values[nearest] - values[index])
        factor = values[index] / values[nearest]
        growth = factor if factor < 1 else math.pow(factor, KEPT_EXPONENT)
        return 1 - min(1.0, (1 - known) * growth)


def _scale(error: float, old: float, new: float, kind: ErrorKind) -> float:
    """Returns an error scaled by the change of another setting's error from old to new."""
    if kind != "selection":
        return error * max(new, TINY) / max(old, TINY)
    return 1 - min(1.0, (1 - error) * max(1 - new, TINY) / max(1 - old, TINY))


def relative_progress(error: float, kind: ErrorKind, remaining_steps: int) -> float:
    """Returns the progress of a step relative to one without error.

    With a residual the error arrives later: the run falls behind only once, which matters less the
    more steps remain. Without a residual, the variance slows down every step.
    """
    if kind == "noise":
        return 1 / (1 + error)
    share = math.sqrt(max(1 - error, TINY))
    return 1 / (1 + (1 / share - 1) * LAG_STEPS / remaining_steps)


class LayerModel:
    """Message lengths of a layer by grid index, and samples of its compression error."""

    def __init__(self, shape: Sequence[int], grid: Sequence[GridPoint]) -> None:
        self.shape = list(shape)
        self.numel = math.prod(shape)
        self.message_bytes = [point.compressor.nbytes(self.shape) for point in grid]
        self.relative = RelativeErrors()
        self._values = [point.value for point in grid]

    def effective(self, index: int) -> int:
        """Returns the index itself, or 0 (dense) if the dense message is not longer."""
        return 0 if self.message_bytes[index] >= self.message_bytes[0] else index

    def reachable(self, current: int) -> list[int]:
        """Returns the settings to consider, each with a shorter message than those before it.

        At most one is beyond all whose error is known; without samples only the current one.
        """
        current = self.effective(current)
        known = self.relative.errors
        if not known:
            return [current]
        limit = max(current, *known)
        useful: list[int] = []
        for index, length in enumerate(self.message_bytes):
            if all(length < self.message_bytes[other] for other in useful):
                useful.append(index)
            if useful[-1] > limit:
                break
        # The current setting must be sampled before a stronger one is tried.
        unsampled = not is_uncompressed(current) and current not in known
        return [index for index in useful if not (unsampled and index > limit)]

    def error(self, index: int, kind: ErrorKind) -> float:
        """Returns the predicted squared error of a step."""
        index = self.effective(index)
        if is_uncompressed(index) or not self.relative.errors:
            return 0.0
        return self.relative.energy * self.relative.predict(index, self._values, kind)

    def state_dict(self) -> dict[str, object]:
        errors = {str(index): error for index, error in self.relative.errors.items()}
        return {"shape": list(self.shape), "relative": {**vars(self.relative), "errors": errors}}


def load_layer(saved: Mapping[str, Any], grid: Sequence[GridPoint]) -> LayerModel:
    layer = LayerModel(saved["shape"], grid)
    errors = {int(index): error for index, error in saved["relative"]["errors"].items()}
    layer.relative = RelativeErrors(**{**saved["relative"], "errors": errors})
    return layer
