"""What parameters of methods must be, said in one way: name, rule and value."""

from laconic.errors import ConfigError


def check_whole(method: str, key: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ConfigError unless the value is an integer from `low` on, up to `high` if given."""
    rule = f"{low} to {high}" if high is not None else f"at least {low}"
    good = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not good or (high is not None and isinstance(value, int) and value > high):
        raise ConfigError(f"{method}: {key} must be {rule}, got {value!r}")


def check_number(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a number at all."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{method}: {key} must be a number, got {value!r}")


def check_fraction(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{method}: {key} must be in (0, 1], got {value!r}")


def check_share(method: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{method}: {key} must be in [0, 1), got {value!r}")
