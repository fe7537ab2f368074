"""Rows of the table of candidates: calibrations, load, risk and measured steps of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gradwire.auto.accuracy_risk import LEVELS, Level
from gradwire.auto.calibration import Calibration
from gradwire.auto.step_model import ExchangeLoad


@dataclass
class Row:
    """The measurements of a candidate."""

    groups: list[Calibration] = field(default_factory=list)
    """The calibration of each group of parameters."""
    load: ExchangeLoad | None = None
    error: float = 0.0
    level: Level = "high"
    why: str = "not measured"
    times_s: list[float] = field(default_factory=list)
    wire_s: float | None = None
    """Wire time of the last of these steps."""
    retries: int = 0
    """The number of times that it was timed again after the search had settled on another."""

    def measured_s(self) -> float | None:
        """Returns the typical measured step."""
        return typical(self.times_s) if self.times_s else None

    def expected_s(self) -> tuple[float, float] | None:
        """Returns wire and step time as they were measured."""
        step_s = self.measured_s()
        return None if step_s is None or self.wire_s is None else (self.wire_s, step_s)

    def state_dict(self) -> dict[str, object]:
        load = self.load
        return {
            **vars(self),
            "times_s": list(self.times_s),
            "groups": [list(part) for part in self.groups],
            "load": None if load is None else [load.codec_s, load.hops, load.link_bytes],
        }


def typical(times_s: Sequence[float]) -> float:
    """Returns the mean of the shortest three quarters: where one is long, another program ran."""
    count = max(1, (3 * len(times_s) + 2) // 4)
    return sum(sorted(times_s)[:count]) / count


def row_of(saved: Mapping[str, Any]) -> Row:
    """Returns the row of a saved state; raises ValueError or KeyError if it is none."""
    if saved["level"] not in LEVELS:
        raise ValueError(f"no level {saved['level']!r}")
    return Row(
        [Calibration(*numbers) for numbers in saved["groups"]],
        None if saved["load"] is None else ExchangeLoad(*saved["load"]),
        saved["error"],
        cast(Level, saved["level"]),
        saved["why"],
        list(saved["times_s"]),
        saved["wire_s"],
        saved["retries"],
    )
