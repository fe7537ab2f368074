"""Base classes of controllers: a frozen configuration, and the state of a run on one rank.

The state sees only numbers that all ranks agree on, so all ranks decide the same without asking
each other. Between two steps it returns the setting of each lane; after a step it receives a
report. Controllers are found by name: the folder is the registry.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

import gradwire.control
from gradwire.base import Compressor
from gradwire.compressors._sparsifier import Pipeline
from gradwire.control.timing import StepTiming
from gradwire.engine.step import SAMPLE_EVERY
from gradwire.errors import ConfigError
from gradwire.spec import build_from, name_of

T = TypeVar("T", bound=Compressor)

Saved: TypeAlias = dict[str, object]
"""A pilot's state: plain tensors, numbers, texts, and lists and dicts of them."""

REMEMBERED = 200
"""So many of the last decisions are kept to be read."""


@dataclass(frozen=True)
class Setting:
    """How a lane talks from now on."""

    compressor: Compressor
    dense: bool = False
    """All is said in this step, residual included, by the exchange that suits that."""


class Decision(NamedTuple):
    """Which setting from which step on, and why."""

    step: int
    setting: str
    reason: str


class Log:
    """The last decisions, oldest first."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.now = 0
        """The step at which a pilot takes over, and first decides."""

    def add(self, step: int, setting: str, reason: str) -> None:
        self.decisions = [*self.decisions, Decision(step, setting, reason)][-REMEMBERED:]

    def rows(self) -> list[dict[str, object]]:
        return [decision._asdict() for decision in self.decisions]


class StepReport(NamedTuple):
    """What all ranks know of a step that counts."""

    step: int
    """Steps that count, this one included."""
    numbers: Sequence[tuple[Sequence[str], Sequence[float]]]
    """The mean over ranks of what pilots told: for each message, the parameters and the numbers."""
    last_s: float | None
    """How long the step before this one took, the mean over ranks; None where nobody knows."""
    lap: StepTiming | None = None
    """The same with where the time went."""
    lost: Mapping[str, Tensor] = {}
    """This rank's own, for pilots to tell: what of it the step lost, where that was sampled.

    [2] a parameter: sums of squares of what was left unsaid, and of all there was to say.
    """


class ControllerState(ABC):
    """Decides for the steered parameters of a model: those that are compressed at all."""

    log: "Log"
    samples_every: ClassVar[int] = SAMPLE_EVERY
    """One in so many steps is looked at for what it loses, which costs passes over memory."""

    @property
    @abstractmethod
    def asks(self) -> bool:
        """Whether ranks tell each other numbers at the next step."""

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether the next step takes more for them than others do, and cannot be replayed."""

    @abstractmethod
    def order(self, name: str) -> Setting:
        """What the lane of this parameter does at the next step."""

    @abstractmethod
    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        """Hears of a gradient before it goes out, times a loss scale.

        What comes of it is a draft until `step`.
        """

    @abstractmethod
    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        """This rank's numbers for the message about these parameters; None before they are known.

        They are zero-dimensional float32 tensors; asked after `listen`, in every round of talks.
        """

    @abstractmethod
    def step(self, heard: StepReport) -> None:
        """A step has ended that counts."""

    @abstractmethod
    def skip(self) -> None:
        """A step has ended that does not count: its drafts are void."""

    @abstractmethod
    def epoch(self, step: int, learning_rate: float | None) -> None:
        """An epoch has ended after so many steps; the rate is that of the next, if it is told."""

    @abstractmethod
    def rate_changed(self, step: int, before: float, after: float) -> None:
        """The learning rate changes after so many steps."""

    def resize(self) -> None:  # noqa: B027 - few know anything that depends on it
        """Goes on among another number of ranks: what depends on that is known no more."""

    @abstractmethod
    def save(self) -> Saved: ...

    @abstractmethod
    def load(self, saved: Mapping[str, object]) -> None: ...

    @abstractmethod
    def explain(self) -> dict[str, object]:
        """What it knows and does now, for people."""


class Controller(ABC):
    """A rule that changes a method's settings while it runs; its parameters are its fields."""

    @abstractmethod
    def pilot(
        self,
        compressor: Compressor,
        names: Sequence[str],
        size: int,
        old: ControllerState | None = None,
    ) -> ControllerState:
        """The state of a run on one of `size` ranks, for the parameters that are compressed.

        `old` is the pilot before a switch to this compressor: what it knows may still hold. Raises
        ConfigError where the compressor has nothing to set.
        """

    def settings(self, compressor: Compressor) -> Sequence[Compressor]:
        """What it may order that the plan may refuse: with its memory or exchange, for example."""
        return ()


def setting_of(compressor: Compressor, key: str) -> object:
    """The value of a compressor's setting; of a pipeline's, that of the sparsifier first."""
    for method in _stages(compressor):
        if key in _keys(method):
            return getattr(method, key)
    names = sorted({name for method in _stages(compressor) for name in _keys(method)})
    raise ConfigError(f"{name_of(compressor)} has no setting {key!r} to control; it has {names}")


def with_setting(compressor: Compressor, key: str, value: float) -> Compressor:
    """The same compressor with another value, which is rounded where the setting is whole."""
    old = setting_of(compressor, key)
    if isinstance(old, bool) or not isinstance(old, int | float):
        raise ConfigError(f"{name_of(compressor)}: {key} is {old!r}, which is no number to control")
    new: float = round(value) if isinstance(old, int) else value
    if isinstance(compressor, Pipeline):
        if key in _keys(compressor.sparsifier):
            return replace(compressor, sparsifier=_with(compressor.sparsifier, key, new))
        return replace(compressor, quantiser=_with(compressor.quantiser, key, new))
    return _with(compressor, key, new)


def at_setting(compressor: Compressor, key: str, value: float) -> Compressor:
    """The same with just this value; ConfigError where it would have to be rounded."""
    found = with_setting(compressor, key, value)
    if setting_of(found, key) != value:
        raise ConfigError(f"{name_of(compressor)}: {key} must be whole, got {value!r}")
    return found


def _with(method: T, key: str, value: float) -> T:
    return replace(method, **{key: value})  # type: ignore[type-var]


def _stages(compressor: Compressor) -> tuple[Compressor, ...]:
    if isinstance(compressor, Pipeline):
        return compressor.sparsifier, compressor.quantiser
    return (compressor,)


def _keys(method: Compressor) -> list[str]:
    return [f.name for f in fields(method)]  # type: ignore[arg-type]


def find_controller(given: Controller | str | None) -> Controller | None:
    """The controller that a spec string describes; or the given one itself."""
    if isinstance(given, str):
        # mypy takes an abstract class for none that may be asked for.
        return build_from(gradwire.control, Controller, "controller", given)  # type: ignore[type-abstract]
    if given is not None and not isinstance(given, Controller):
        raise ConfigError(f"expected a controller or its spec, got {given!r}")
    return given
