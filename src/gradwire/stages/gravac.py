"""GraVAC between stages: chooses the bits of each boundary and direction from gain and link.

The gain of a setting is the share of the squared norm that survives it. Among the settings whose
gain passes a gate, that with the most gain per predicted second of a step is used. The sender
decides for its own direction, and its messages announce the setting of the next step, so both ends
change at the same step. Tyagi & Swany 2023, arXiv:2305.12201.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from gradwire.base import OneRound
from gradwire.checks import check_positive_fraction, check_whole
from gradwire.errors import ConfigError
from gradwire.stages.method import Direction, Form, body_bytes, stage_method

_USUAL = Form((256, 256), torch.float32)


@dataclass(frozen=True)
class StageGraVAC:
    """Chooses among the methods of `ladder` down to the given one, for each boundary by itself.

    `ladder` lists specs from many bytes to few, separated by "/". Every `window` of steps a sender
    measures the gain of all of them on one micro-batch, and the link. A setting needs a gain of at
    least `epsilon` (0.98: a relative error of at most 0.14). A change must promise more gain per
    second by the fraction `omega`. `alpha` is the weight of the newest gain in its average.
    """

    ladder: str = "none/int8/int4"
    epsilon: float = 0.98
    omega: float = 0.01
    window: int = 20
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.ladder, str) or not self.ladder:
            raise ConfigError(
                f"gravac: ladder must be specs such as none/int4, got {self.ladder!r}"
            )
        for name in ("epsilon", "omega", "alpha"):
            check_positive_fraction("gravac", name, getattr(self, name))
        check_whole("gravac", "window", self.window, 2)

    def settings(self, direction: Direction, method: OneRound) -> tuple[OneRound, ...]:
        """Returns the ladder's methods with longer messages than the given one, and that one."""
        rungs = [stage_method(direction, spec) for spec in self.ladder.split("/")]
        least = body_bytes(method, _USUAL)
        longer = [rung for rung in rungs if body_bytes(rung, _USUAL) > least]
        longer.sort(key=lambda rung: -body_bytes(rung, _USUAL))
        return (*longer, method)


def controller_of(given: StageGraVAC | str | None) -> StageGraVAC | None:
    """Returns the controller that `controller=` names or is."""
    if given == "gravac":
        return StageGraVAC()
    if given is not None and not isinstance(given, StageGraVAC):
        raise ConfigError(
            "attach_pipeline: controller must be 'gravac', a StageGraVAC or None, got "
            f"{given!r}; others control ranks that all see the same gradient"
        )
    return given


class LinkSpeed(NamedTuple):
    """A link as measured between the two ends: seconds for an empty message and per byte."""

    latency_s: float
    byte_s: float


class Search:
    """The search of one sender: gains by setting, step times, and the choice."""

    def __init__(self, config: StageGraVAC, settings: int) -> None:
        self._config = config
        self.gains: list[float | None] = [None] * settings
        self.link: LinkSpeed | None = None
        self._steps_s: list[float] = []

    def add_gain(self, setting: int, gain: float) -> None:
        old, alpha = self.gains[setting], self._config.alpha
        self.gains[setting] = gain if old is None else alpha * gain + (1 - alpha) * old

    def add_step(self, seconds: float) -> None:
        self._steps_s = [*self._steps_s, seconds][-self._config.window :]

    def choose(self, current: int, step_bytes: Sequence[int]) -> int:
        """Returns the setting with the most gain per second; `step_bytes` are those of each."""
        if self.link is None or not self._steps_s:
            return current
        step_s = median(self._steps_s)
        least_s = 0.01 * step_s
        scores: dict[int, float] = {}
        for setting, gain in enumerate(self.gains):
            if gain is None or (setting > 0 and gain < self._config.epsilon):
                continue
            saved_s = (step_bytes[current] - step_bytes[setting]) * self.link.byte_s
            scores[setting] = gain / max(least_s, step_s - saved_s)
        if not scores:
            return 0
        best = max(scores, key=lambda setting: scores[setting])
        # The first setting compresses least: it is left, and returned to, only for a reason.
        if current in scores and scores[best] <= (1 + self._config.omega) * scores[current]:
            return current
        return best

    def state(self) -> dict[str, object]:
        link = self.link
        return {
            "gains": list(self.gains),
            "link": None if link is None else [link.latency_s, link.byte_s],
            "steps_s": list(self._steps_s),
        }

    def load(self, saved: Mapping[str, object]) -> None:
        gains, link, steps_s = saved["gains"], saved["link"], saved["steps_s"]
        assert isinstance(gains, list)
        assert isinstance(steps_s, list)
        self.gains, self._steps_s = list(gains), list(steps_s)
        self.link = LinkSpeed(*link) if isinstance(link, list) else None
