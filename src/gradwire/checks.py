"""Checks of parameters, whose errors all state name, rule and value."""

import sys
from numbers import Real

from torch import Tensor

from gradwire.errors import ConfigError


def check_whole(method: str, key: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ConfigError unless the value is an integer in [low, high]; None means no bound."""
    rule = f"{low} to {high}" if high is not None else f"at least {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{method}: {key} must be a whole number, {rule}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{method}: {key} must be {rule}, got {value!r}")


def check_flag(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{method}: {key} must be True or False, got {value!r}")


def check_number(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is an int or float in the range of finite floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{method}: {key} must be a number, got {value!r}")
    if not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{method}: {key} must be finite, got {value!r}")


def read_number(method: str, key: str, value: object) -> float:
    """Returns the value as a float; accepts the scalars of torch and NumPy of training loops."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Real) and not isinstance(value, int | float):
        value = float(value)
    check_number(method, key, value)
    assert isinstance(value, int | float)
    return float(value)


def check_positive_fraction(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{method}: {key} must be in (0, 1], got {value!r}")


def check_fraction_below_one(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{method}: {key} must be in [0, 1), got {value!r}")
