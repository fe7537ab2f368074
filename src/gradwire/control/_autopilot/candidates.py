"""Grid of candidate settings of a method, ordered from dense to the strongest compression."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from gradwire.base import Compressor, Traits
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.none import NoCompression
from gradwire.control.base import setting_of, with_setting
from gradwire.errors import ConfigError
from gradwire.spec import format_spec

GRID_VALUES: dict[str, Sequence[float]] = {
    "ratio": (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001),
    "rank": (64, 32, 16, 8, 4, 2, 1),
    "bits": (8, 7, 6, 5, 4, 3, 2, 1),
    "k": (512, 256, 128, 64, 32, 16, 8, 4, 2, 1),
}
"""Candidate values by setting; the first of these settings that a method has is controlled."""

UNCOMPRESSED: tuple[Compressor, ...] = (NoCompression(), Bf16())
"""The whole gradient in 32 and in 16 bits: the first points of the grid, with next to no error."""


class GridPoint(NamedTuple):
    compressor: Compressor
    value: float
    """Value of the controlled setting; infinity for uncompressed gradients."""

    def label(self) -> str:
        return "dense" if isinstance(self.compressor, NoCompression) else format_spec(self[0])


def is_uncompressed(index: int) -> bool:
    """Returns whether this point of any grid sends the whole gradient."""
    return index < len(UNCOMPRESSED)


def setting_grid(compressor: Compressor, key: str) -> list[GridPoint]:
    """Returns the uncompressed points, then the method's settings, its own among them.

    Only settings that support the same memory and exchange as the method itself.
    """
    own = float(str(setting_of(compressor, key)))
    found = [GridPoint(compressor, own)]
    for value in GRID_VALUES[key]:
        with suppress(ConfigError):
            candidate = with_setting(compressor, key, value)
            if value != own and _traits(candidate) == _traits(compressor):
                found.append(GridPoint(candidate, value))
    found.sort(key=lambda point: -point.value)
    return [*(GridPoint(dense, math.inf) for dense in UNCOMPRESSED), *found]


def check_setting_name(wanted: str) -> None:
    if wanted not in ("auto", *GRID_VALUES):
        names = [*GRID_VALUES]
        raise ConfigError(f"autopilot: setting must be auto or one of {names}, got {wanted!r}")


def controlled_setting(compressor: Compressor, wanted: str) -> str:
    """Returns the name of the setting to control; raises ConfigError if there is none."""
    if wanted != "auto":
        _check_number(compressor, wanted)
        return wanted
    for key in GRID_VALUES:
        with suppress(ConfigError):
            _check_number(compressor, key)
            return key
    names = [*GRID_VALUES]
    raise ConfigError(
        f"autopilot: {format_spec(compressor)} has no factor; use a method with one of {names}"
    )


def _check_number(compressor: Compressor, key: str) -> None:
    """Raises ConfigError unless the compressor has such a setting, and it can be set."""
    with_setting(compressor, key, float(str(setting_of(compressor, key))))


def _traits(compressor: Compressor) -> Traits:
    return compressor.traits()._replace(why_not="")
