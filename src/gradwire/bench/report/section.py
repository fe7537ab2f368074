"""A section of the report: summary, table, plots and the decisions of controllers.

Also functions for the cells and the grid of tables that do not show runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.bench import human
from gradwire.bench.records.schema import FollowRecord, TrainRecord
from gradwire.bench.report.grid import Cell, Grid, Row
from gradwire.bench.report.plotdata import Plot


def text_cell(text: str) -> Cell:
    return Cell(text, text)


def count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def ms(time_ms: float | None) -> Cell:
    return Cell(human.duration_ms(time_ms), time_ms)


def seconds(time_s: float | None) -> Cell:
    return Cell(human.duration_s(time_s), time_s)


def ratio(value: float, places: int = 2) -> Cell:
    return Cell(f"{value:.{places}f}", value)


def yes_cell(value: bool) -> Cell:
    return text_cell("yes" if value else "no")


def grid_of(
    columns: Mapping[str, Sequence[Cell]], good: Sequence[bool] = (), methods: bool = False
) -> Grid:
    """Transposes columns to rows; the last cell of a row that is not `good` is highlighted."""
    rows = list(zip(*columns.values(), strict=True))
    states = ["done" if fine else "failed" for fine in good or [True] * len(rows)]
    made = (Row(row[0].text, state, row) for row, state in zip(rows, states, strict=True))
    return Grid(tuple(columns), tuple(made), methods)


@dataclass(frozen=True)
class Section:
    """A section of the report, usually the runs of one setting."""

    heading: str
    summary: str
    grid: Grid
    plots: tuple[Plot, ...] = ()
    runs: tuple[TrainRecord | FollowRecord, ...] = ()
    """Runs whose controllers' decisions are shown."""
    group: str = ""
    """What a long page folds together, such as all settings of a workload."""
    gain: float | None = None
    """Time of dense training over that of the fastest other method, if both were run."""


def methods_of(sections: Iterable[Section]) -> list[str]:
    """Returns the methods that have a colour and can be hidden, in order of appearance."""
    rows = (row for part in sections if part.grid.methods for row in part.grid.rows)
    return list(dict.fromkeys(row.spec for row in rows))
