"""Base classes of controllers: a frozen configuration, and the state of a run on one rank.

The state sees only numbers that all ranks agree on, so all ranks decide the same without asking
each other. Between two steps it returns the setting of each lane; after a step it receives a
report. Controllers are found by name, in the folder or as plug-ins
(`gradwire.registry`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

import gradwire.control
from gradwire.base import Compressor
from gradwire.compressors._nested import NestedSelection
from gradwire.compressors._sparsifier import Pipeline
from gradwire.control.timing import StepTiming
from gradwire.engine.step import SAMPLE_EVERY
from gradwire.errors import ConfigError
from gradwire.registry import Registry
from gradwire.spec import build_from, name_of

T = TypeVar("T", bound=Compressor)

StateDict: TypeAlias = dict[str, object]
"""The state of a controller: tensors, numbers, strings, and lists and dicts of them."""

MAX_DECISIONS = 200
"""Number of decisions that the log keeps."""


@dataclass(frozen=True)
class Setting:
    """The setting of a lane: its compressor, and whether the step is dense."""

    compressor: Compressor
    dense: bool = False
    """Sends the whole gradient, residual included, by the dense form of the exchange."""


class Decision(NamedTuple):
    """A setting, the step from which it is used, and the reason."""

    step: int
    setting: str
    reason: str


class DecisionLog:
    """Keeps the last decisions, oldest first."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.start_step = 0
        """The step of a new controller state's first decision."""

    def add(self, step: int, setting: str, reason: str) -> None:
        self.decisions = [*self.decisions, Decision(step, setting, reason)][-MAX_DECISIONS:]

    def rows(self) -> list[dict[str, object]]:
        return [decision._asdict() for decision in self.decisions]


class StepReport(NamedTuple):
    """Facts about a completed step, the same on all ranks except for `local_errors`."""

    step: int
    """Number of completed steps, this one included."""
    statistics: Sequence[tuple[Sequence[str], Sequence[float]]]
    """Mean over ranks of the local statistics: for each message, its parameters and the numbers."""
    previous_step_s: float | None
    """Duration of the step before this one, the mean over ranks; None if unknown."""
    previous_timing: StepTiming | None = None
    """The duration of the step before this one with its breakdown."""
    local_errors: Mapping[str, Tensor] = {}
    """Errors that were sampled on this rank in this step, to be sent as local statistics.

    [2] a parameter: sums of squares of the compression error, and of gradient plus residual.
    """


class ControllerState(ABC):
    """Selects settings for the controlled parameters of a model: those that are compressed."""

    log: "DecisionLog"
    sample_interval: ClassVar[int] = SAMPLE_EVERY
    """The compression error is sampled once in so many steps, since that costs memory passes."""

    @property
    @abstractmethod
    def wants_statistics(self) -> bool:
        """True if ranks exchange statistics in the next step."""

    @property
    @abstractmethod
    def needs_measurement(self) -> bool:
        """True if the next step does extra work for statistics, so that no graph is replayed."""

    @abstractmethod
    def setting_for(self, name: str) -> Setting:
        """Returns the setting of this parameter's lane for the next step."""

    @abstractmethod
    def observe_gradient(self, name: str, grad: Tensor, scale: float) -> None:
        """Reads a gradient, multiplied by a loss scale, before it is sent.

        Statistics of it stay pending until `end_step`.
        """

    @abstractmethod
    def local_statistics(self, names: Sequence[str]) -> list[Tensor] | None:
        """Returns this rank's statistics of these parameters; None until they are known.

        They are zero-dimensional float32 tensors. Called after `observe_gradient`, once a round.
        """

    @abstractmethod
    def end_step(self, report: StepReport) -> None:
        """Commits pending statistics after a step, and may change settings."""

    @abstractmethod
    def skip_step(self) -> None:
        """Discards pending statistics after a step that was skipped."""

    @abstractmethod
    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        """Notes the end of an epoch, and the learning rate of the next one if it is known."""

    @abstractmethod
    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        """Notes that the learning rate changes after `step` steps."""

    def world_size_changed(self) -> None:  # noqa: B027 - most keep nothing that depends on it
        """Discards measurements that depend on the world size."""

    @abstractmethod
    def state_dict(self) -> StateDict: ...

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, object]) -> None: ...

    @abstractmethod
    def explain(self) -> dict[str, object]:
        """Returns the current setting and measurements, for `stats()["controller"]`."""


class Controller(ABC):
    """A policy that changes a method's settings during training; its parameters are its fields."""

    @abstractmethod
    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        """Returns the state of a run on one rank, for the parameters that are compressed.

        `previous` is the state before a switch to this compressor, whose measurements may still be
        valid. Raises ConfigError if the compressor has no setting to control.
        """

    def settings(self, compressor: Compressor) -> Sequence[Compressor]:
        """Returns the settings it may select that the memory or the exchange may not support."""
        return ()


# mypy does not accept an abstract class as the kind to look for.
CONTROLLERS = Registry("controller", "controllers", gradwire.control, Controller)  # type: ignore[type-abstract]


def setting_of(compressor: Compressor, key: str) -> object:
    """Returns a setting of a compressor; in a pipeline the sparsifier's comes first."""
    for method in _stages(compressor):
        if key in _keys(method):
            return getattr(method, key)
    names = sorted({name for method in _stages(compressor) for name in _keys(method)})
    raise ConfigError(f"{name_of(compressor)} has no setting {key!r} to control; it has {names}")


def with_setting(compressor: Compressor, key: str, value: float) -> Compressor:
    """Returns the compressor with another value, rounded if the setting is an integer."""
    old = setting_of(compressor, key)
    if isinstance(old, bool) or not isinstance(old, int | float):
        raise ConfigError(f"{name_of(compressor)}: {key} is {old!r}, which is not a number")
    new: float = round(value) if isinstance(old, int) else value
    return _with(compressor, key, new)


def at_setting(compressor: Compressor, key: str, value: float) -> Compressor:
    """Returns the compressor with exactly this value; raises ConfigError instead of rounding."""
    found = with_setting(compressor, key, value)
    if setting_of(found, key) != value:
        raise ConfigError(f"{name_of(compressor)}: {key} must be whole, got {value!r}")
    return found


def _with(method: T, key: str, value: float) -> T:
    """Returns the method with another value, in the first of its stages that has the setting."""
    for name, stage in _fields_of_stages(method).items():
        if any(key in _keys(one) for one in _stages(stage)):
            return replace(method, **{name: _with(stage, key, value)})  # type: ignore[type-var]
    return replace(method, **{key: value})  # type: ignore[type-var]


def _stages(compressor: Compressor) -> tuple[Compressor, ...]:
    """Returns the stages of a pipeline, or the compressor alone."""
    inside = [one for stage in _fields_of_stages(compressor).values() for one in _stages(stage)]
    return tuple(inside) or (compressor,)


def _fields_of_stages(method: object) -> dict[str, Compressor]:
    if isinstance(method, Pipeline):
        return {"sparsifier": method.sparsifier, "quantiser": method.quantiser}
    if isinstance(method, NestedSelection):
        return {"outer": method.outer, "inner": method.inner}
    return {}


def _keys(method: Compressor) -> list[str]:
    return [f.name for f in fields(method)]  # type: ignore[arg-type]


def find_controller(given: Controller | str | None) -> Controller | None:
    """Returns the controller that a spec string describes, or the given controller itself."""
    if isinstance(given, str):
        return build_from(CONTROLLERS, given)
    if given is not None and not isinstance(given, Controller):
        raise ConfigError(f"expected a controller or its spec, got {given!r}")
    return given
