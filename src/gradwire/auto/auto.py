"""The configuration of the automatic mode, and its spec: "auto" or "auto:risk=low"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from gradwire.errors import ConfigError
from gradwire.spec import from_settings, read_settings

RiskBudget: TypeAlias = Literal["low", "medium"]

NAME = "auto"


@dataclass(frozen=True)
class Auto:
    """Chooses the method that makes steps shortest on this link, within a budget of risk.

    `risk` bounds the accuracy risk of a method (`auto/accuracy_risk.py`): "low" admits methods
    rated none or low, "medium" those rated medium, too. A method rated high is never chosen.
    """

    risk: RiskBudget = "medium"

    examples: ClassVar[Sequence[Mapping[str, object]]] = ({}, {"risk": "low"})

    def __post_init__(self) -> None:
        if self.risk not in get_args(RiskBudget):
            known = [*get_args(RiskBudget)]
            raise ConfigError(f"auto: risk must be one of {known}, got {self.risk!r}")


def find_auto(method: object) -> Auto | None:
    """Returns the configuration if a method is the automatic mode or its spec, else None."""
    if isinstance(method, Auto):
        return method
    if not isinstance(method, str) or method.partition(":")[0].strip() != NAME:
        return None
    return from_settings(NAME, Auto, read_settings(method, "auto:risk=low")[1])


def check_alone(memory: object, exchange: object, controller: object) -> None:
    """Raises ConfigError if an option is set that the automatic mode chooses itself."""
    if controller is not None:
        raise ConfigError(
            f"auto: changes the method itself; leave controller out, got {controller!r}"
        )
    if memory is not None:
        raise ConfigError(f"auto: chooses the memory itself; leave memory out, got {memory!r}")
    if exchange != "auto":
        raise ConfigError(
            f"auto: chooses the exchange itself; leave exchange out, got {exchange!r}"
        )


def check_ranks(size: int) -> None:
    """Raises ConfigError if there is no link to choose a method for."""
    if size < 2:
        raise ConfigError(f"auto: needs at least two ranks, since one has no link, got {size}")
