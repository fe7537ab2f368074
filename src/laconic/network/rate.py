"""Link rates as people write them, such as "100mbit", and as bits per second."""

import re

from laconic.errors import ConfigError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)", re.IGNORECASE)


def parse_rate(text: str) -> int:
    """The bits per second that `text` names; decimal units, as on the box of a switch."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"rate: expected a number and bit, kbit, mbit or gbit such as '100mbit', got {text!r}"
        )
    rate_bits = round(float(match[1]) * _UNITS[match[2].lower()])
    if rate_bits < 1:
        raise ConfigError(f"rate: must be at least 1bit, got {text!r}")
    return rate_bits


def format_rate(rate_bits: int) -> str:
    """The shortest text that `parse_rate` reads back, in the largest unit that is not below 1."""
    unit, size = next(
        ((unit, size) for unit, size in _UNITS.items() if rate_bits >= size), ("bit", 1)
    )
    return f"{rate_bits / size:.12g}{unit}"
