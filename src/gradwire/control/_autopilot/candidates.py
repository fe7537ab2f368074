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

VALUES: dict[str, Sequence[float]] = {
    "ratio": (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001),
    "rank": (64, 32, 16, 8, 4, 2, 1),
    "bits": (8, 7, 6, 5, 4, 3, 2, 1),
    "k": (512, 256, 128, 64, 32, 16, 8, 4, 2, 1),
}
"""What a method's setting may be; the first of these that a method has is its factor."""

WHOLE: tuple[Compressor, ...] = (NoCompression(), Bf16())
"""All of a gradient, in 32 and in 16 bits: the ladder's first rungs, which lose next to nothing."""


class Rung(NamedTuple):
    compressor: Compressor
    value: float
    """Of the method's factor; infinite where all is said."""

    def words(self) -> str:
        return "dense" if isinstance(self.compressor, NoCompression) else format_spec(self[0])


def is_whole(place: int) -> bool:
    """Whether all of a gradient is said at this place of any ladder."""
    return place < len(WHOLE)


def ladder(compressor: Compressor, key: str) -> list[Rung]:
    """All of a gradient first, then the method's settings, its own among them.

    Only those that may go with the same memory and exchange as the method itself.
    """
    own = float(str(setting_of(compressor, key)))
    found = [Rung(compressor, own)]
    for value in VALUES[key]:
        with suppress(ConfigError):
            rung = with_setting(compressor, key, value)
            if value != own and _kind(rung) == _kind(compressor):
                found.append(Rung(rung, value))
    found.sort(key=lambda rung: -rung.value)
    return [*(Rung(whole, math.inf) for whole in WHOLE), *found]


def check_factor(wanted: str) -> None:
    if wanted not in ("auto", *VALUES):
        raise ConfigError(f"autopilot: setting must be auto or one of {[*VALUES]}, got {wanted!r}")


def factor_of(compressor: Compressor, wanted: str) -> str:
    """The name of the setting that says how much is compressed; ConfigError where there is none."""
    if wanted != "auto":
        _check_number(compressor, wanted)
        return wanted
    for key in VALUES:
        with suppress(ConfigError):
            _check_number(compressor, key)
            return key
    raise ConfigError(
        f"autopilot: {format_spec(compressor)} has no factor; use a method with one of {[*VALUES]}"
    )


def _check_number(compressor: Compressor, key: str) -> None:
    """Raises ConfigError unless the compressor has such a setting, and it can be set."""
    with_setting(compressor, key, float(str(setting_of(compressor, key))))


def _kind(compressor: Compressor) -> Traits:
    return compressor.traits()._replace(why_not="")
