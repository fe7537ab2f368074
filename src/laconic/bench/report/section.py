"""What the page says about one topic: a summary, a table, plots, and what controllers decided."""

from collections.abc import Iterable
from dataclasses import dataclass

from laconic.bench.records.follow import FollowRecord
from laconic.bench.records.kinds import TrainRecord
from laconic.bench.report.grid import Grid
from laconic.bench.report.plotdata import Plot


@dataclass(frozen=True)
class Section:
    """Most often the runs of one setting."""

    heading: str
    summary: str
    grid: Grid
    plots: tuple[Plot, ...] = ()
    runs: tuple[TrainRecord | FollowRecord, ...] = ()
    """Those whose controllers' decisions are told."""


def methods_of(sections: Iterable[Section]) -> list[str]:
    """The methods that have a colour and can be hidden, in order of appearance."""
    rows = (row for part in sections if part.grid.methods for row in part.grid.rows)
    return list(dict.fromkeys(row.spec for row in rows))
