"""Latencies as people write them, such as "0.1ms", and as seconds."""

import re

from laconic.errors import ConfigError

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us)", re.IGNORECASE)


def parse_latency(text: str) -> float:
    """The seconds that `text` names."""
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"latency: expected a number and s, ms or us such as '0.1ms', got {text!r}"
        )
    return float(match[1]) * _UNITS[match[2].lower()]
