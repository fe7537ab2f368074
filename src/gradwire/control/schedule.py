"""Schedule: moves a setting from one value to another in stages, as in the warm-up of DGC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_number, check_whole
from gradwire.compressors.none import NoCompression
from gradwire.control.base import (
    Controller,
    ControllerState,
    DecisionLog,
    Setting,
    StateDict,
    StepReport,
    at_setting,
    with_setting,
)
from gradwire.errors import ConfigError
from gradwire.spec import format_spec


@dataclass(frozen=True)
class Schedule(Controller):
    """Takes `setting` from `first` to `last` in `stages` plateaus over `length` steps or epochs.

    Before that, nothing is compressed for `after` of them. One stage means `last` from the start.
    DGC's warm-up (25, 6.3, 1.6, 0.4, 0.1 % over five epochs) is
    `schedule:first=0.25,last=0.001,stages=5,length=5,unit=epoch`. Plateaus differ by equal factors
    ("geometric") or by equal differences ("linear"). Any other ramp lists its plateaus:
    `via=0.2/0.05` has these two between first and last, all of the same length. Epochs are counted
    by calls of `epoch_ended`.
    """

    last: float
    first: float = 1.0
    setting: str = "ratio"
    length: int = 0
    stages: int = 1
    after: int = 0
    shape: Literal["geometric", "linear"] = "geometric"
    unit: Literal["step", "epoch"] = "step"
    via: str = ""

    examples: ClassVar = ({"last": 0.01},)

    def __post_init__(self) -> None:
        check_number("schedule", "first", self.first)
        check_number("schedule", "last", self.last)
        check_whole("schedule", "after", self.after, 0)
        check_whole("schedule", "stages", self.stages, 1)
        self._check_via()
        count = len(self._via_values()) + 2 if self.via else self.stages
        check_whole("schedule", "length", self.length, count if count > 1 else 0)
        if self.shape not in ("geometric", "linear") or self.unit not in ("step", "epoch"):
            raise ConfigError(f"schedule: unknown shape or unit: {self.shape!r}, {self.unit!r}")
        if self.shape == "geometric" and not (self.first > 0 and self.last > 0):
            values = f"{self.first!r} and {self.last!r}"
            raise ConfigError(f"schedule: a geometric ramp needs positive ends, got {values}")
        if count == 1 and (self.first, self.length) != (1.0, 0):
            got = f"{self.first!r} and {self.length!r}"
            raise ConfigError(
                f"schedule: one stage means last from the start; give stages= or via= for a ramp, "
                f"or omit first and length, got {got}"
            )

    def _check_via(self) -> None:
        if not isinstance(self.via, str):
            raise ConfigError(f"schedule: via must be a string of numbers, a/b/c, got {self.via!r}")
        if self.via and self.stages != 1:
            raise ConfigError(f"schedule: stages must be 1 together with via, got {self.stages}")
        for value in self._via_values():
            check_number("schedule", "via", value)

    def value(self, passed: int) -> float | None:
        """Returns the setting after `passed` steps or epochs; None if the step is dense."""
        if passed < self.after:
            return None
        if passed - self.after >= self.length:
            return self.last
        if self.via:
            plateaus = [self.first, *self._via_values(), self.last]
            return plateaus[(passed - self.after) * len(plateaus) // self.length]
        part = (passed - self.after) * self.stages // self.length / (self.stages - 1)
        if self.shape == "linear":
            return self.first + part * (self.last - self.first)
        return float(self.first * (self.last / self.first) ** part)

    def _via_values(self) -> list[float]:
        """Returns the plateaus of `via`, between first and last."""
        try:
            return [float(text) for text in self.via.split("/")] if self.via else []
        except ValueError:
            raise ConfigError(f"schedule: via must be numbers, a/b/c, got {self.via!r}") from None

    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        # Raises ConfigError if the compressor does not accept one of the values.
        self.settings(compressor)
        return _ScheduleState(self, compressor, previous)

    def settings(self, compressor: Compressor) -> list[Compressor]:
        # If both ends are valid, so are the computed values between them.
        ramp = [self.first, *self._via_values()] if self.via or self.stages > 1 else []
        return [at_setting(compressor, self.setting, value) for value in (*ramp, self.last)]


class _ScheduleState(ControllerState):
    """Counts steps or epochs; the setting follows from that number."""

    def __init__(
        self, config: Schedule, compressor: Compressor, previous: ControllerState | None
    ) -> None:
        self.log = DecisionLog() if previous is None else previous.log
        self._config, self._compressor = config, compressor
        self._passed: int = previous._passed if isinstance(previous, _ScheduleState) else 0
        self._setting = self._scheduled_setting()
        self._log_decision(self.log.start_step)

    def _scheduled_setting(self) -> Setting:
        value = self._config.value(self._passed)
        if value is None:
            return Setting(NoCompression(), dense=True)
        return Setting(with_setting(self._compressor, self._config.setting, value))

    def _log_decision(self, step: int) -> None:
        reason = f"{self._passed} {self._config.unit}s have passed"
        self.log.add(step, format_spec(self._setting.compressor), reason)

    def _advance(self, step: int) -> None:
        self._passed += 1
        setting = self._scheduled_setting()
        if setting != self._setting:
            self._setting = setting
            self._log_decision(step)

    @property
    def wants_statistics(self) -> bool:
        return False

    @property
    def needs_measurement(self) -> bool:
        return False

    def setting_for(self, name: str) -> Setting:
        return self._setting

    def observe_gradient(self, name: str, grad: Tensor, scale: float) -> None:
        pass

    def local_statistics(self, names: Sequence[str]) -> list[Tensor] | None:
        return None

    def end_step(self, report: StepReport) -> None:
        if self._config.unit == "step":
            self._advance(report.step)

    def skip_step(self) -> None:
        pass

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        if self._config.unit == "epoch":
            self._advance(step)

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {"passed": self._passed}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        self._passed = cast(int, saved["passed"])
        self._setting = self._scheduled_setting()

    def explain(self) -> dict[str, object]:
        return {"setting": format_spec(self._setting.compressor), "passed": self._passed}
