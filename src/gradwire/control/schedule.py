"""Schedule: moves a setting from one value to another in stages, as in the warm-up of DGC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_number, check_whole
from gradwire.compressors.none import NoCompression
from gradwire.control.base import (
    Controller,
    ControllerState,
    Log,
    Saved,
    Setting,
    StepReport,
    at_setting,
    with_setting,
)
from gradwire.errors import ConfigError
from gradwire.spec import format_spec


@dataclass(frozen=True)
class Schedule(Controller):
    """Takes `setting` from `first` to `last` in `stages` plateaus over `length` steps or epochs.

    Before that, nothing is compressed for `after` of them. One stage is `last` from the start.
    DGC's warm-up (25, 6.3, 1.6, 0.4, 0.1 % over five epochs) is
    `schedule:first=0.25,last=0.001,stages=5,length=5,unit=epoch`. "geometric" goes by equal
    factors, "linear" by equal differences. Any other ramp says its plateaus: `via=0.2/0.05` has
    these two between first and last, all of one length. Epochs are those that `epoch_ended` tells.
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

    def __post_init__(self) -> None:
        check_number("schedule", "first", self.first)
        check_number("schedule", "last", self.last)
        check_whole("schedule", "after", self.after, 0)
        check_whole("schedule", "stages", self.stages, 1)
        self._check_via()
        count = len(self._between()) + 2 if self.via else self.stages
        check_whole("schedule", "length", self.length, count if count > 1 else 0)
        if self.shape not in ("geometric", "linear") or self.unit not in ("step", "epoch"):
            raise ConfigError(f"schedule: no such shape or unit: {self.shape!r}, {self.unit!r}")
        if self.shape == "geometric" and not (self.first > 0 and self.last > 0):
            values = f"{self.first!r} and {self.last!r}"
            raise ConfigError(f"schedule: a geometric ramp needs positive ends, got {values}")
        if count == 1 and (self.first, self.length) != (1.0, 0):
            got = f"{self.first!r} and {self.length!r}"
            raise ConfigError(
                f"schedule: one stage is last from the start; give stages= or via= for a ramp, or "
                f"leave first and length, got {got}"
            )

    def _check_via(self) -> None:
        if not isinstance(self.via, str):
            raise ConfigError(f"schedule: via must be a text of numbers, a/b/c, got {self.via!r}")
        if self.via and self.stages != 1:
            raise ConfigError(f"schedule: via says how many stages there are, got {self.stages}")
        for value in self._between():
            check_number("schedule", "via", value)

    def value(self, passed: int) -> float | None:
        """The setting after so many steps or epochs; None where nothing is compressed."""
        if passed < self.after:
            return None
        if passed - self.after >= self.length:
            return self.last
        if self.via:
            plateaus = [self.first, *self._between(), self.last]
            return plateaus[(passed - self.after) * len(plateaus) // self.length]
        part = (passed - self.after) * self.stages // self.length / (self.stages - 1)
        if self.shape == "linear":
            return self.first + part * (self.last - self.first)
        return float(self.first * (self.last / self.first) ** part)

    def _between(self) -> list[float]:
        """The plateaus between first and last, where these are said."""
        try:
            return [float(text) for text in self.via.split("/")] if self.via else []
        except ValueError:
            raise ConfigError(f"schedule: via must be numbers, a/b/c, got {self.via!r}") from None

    def pilot(
        self,
        compressor: Compressor,
        names: Sequence[str],
        size: int,
        old: ControllerState | None = None,
    ) -> ControllerState:
        # Raises where one of them cannot be.
        self.settings(compressor)
        return _Scheduled(self, compressor, old)

    def settings(self, compressor: Compressor) -> list[Compressor]:
        # Where both ends are legal, all between them is that nobody has named.
        said = [self.first, *self._between()] if self.via or self.stages > 1 else []
        return [at_setting(compressor, self.setting, value) for value in (*said, self.last)]


class _Scheduled(ControllerState):
    """How many steps or epochs have passed is all there is to know."""

    def __init__(self, rule: Schedule, compressor: Compressor, old: ControllerState | None) -> None:
        self.log = Log() if old is None else old.log
        self._rule, self._compressor = rule, compressor
        self._passed: int = old._passed if isinstance(old, _Scheduled) else 0
        self._order = self._due()
        self._note(self.log.now)

    def _due(self) -> Setting:
        value = self._rule.value(self._passed)
        if value is None:
            return Setting(NoCompression(), dense=True)
        return Setting(with_setting(self._compressor, self._rule.setting, value))

    def _note(self, step: int) -> None:
        reason = f"{self._passed} {self._rule.unit}s have passed"
        self.log.add(step, format_spec(self._order.compressor), reason)

    def _pass(self, step: int) -> None:
        self._passed += 1
        due = self._due()
        if due != self._order:
            self._order = due
            self._note(step)

    @property
    def asks(self) -> bool:
        return False

    @property
    def measures(self) -> bool:
        return False

    def order(self, name: str) -> Setting:
        return self._order

    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        pass

    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        return None

    def step(self, heard: StepReport) -> None:
        if self._rule.unit == "step":
            self._pass(heard.step)

    def skip(self) -> None:
        pass

    def epoch(self, step: int, learning_rate: float | None) -> None:
        if self._rule.unit == "epoch":
            self._pass(step)

    def rate_changed(self, step: int, before: float, after: float) -> None:
        pass

    def save(self) -> Saved:
        return {"passed": self._passed}

    def load(self, saved: Mapping[str, object]) -> None:
        self._passed = cast(int, saved["passed"])
        self._order = self._due()

    def explain(self) -> dict[str, object]:
        return {"setting": format_spec(self._order.compressor), "passed": self._passed}
