"""Reads the operating system's counter of bytes that a network interface has sent."""

from pathlib import Path

from gradwire.errors import ConfigError

_TABLE = Path("/proc/net/dev")
_TRANSMITTED = 8  # the column after the name


def sent_bytes(interface: str) -> int:
    """Returns the bytes sent since the interface was created, headers included; Linux only."""
    lines = _TABLE.read_text().splitlines() if _TABLE.exists() else []
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[_TRANSMITTED])
    raise ConfigError(f"no counters of an interface named {interface!r} in {_TABLE}")
