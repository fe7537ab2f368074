"""Cells of tables about anything but runs, and how columns of them become a grid."""

from collections.abc import Mapping, Sequence

from laconic.bench import human
from laconic.bench.report.grid import Cell, Grid, Row


def word(text: str) -> Cell:
    return Cell(text, text)


def count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def ms(time_ms: float | None) -> Cell:
    return Cell(human.duration_ms(time_ms), time_ms)


def seconds(time_s: float | None) -> Cell:
    return Cell(human.duration_s(time_s), time_s)


def ratio(value: float, places: int = 2) -> Cell:
    return Cell(f"{value:.{places}f}", value)


def yes(value: bool) -> Cell:
    return word("yes" if value else "no")


def grid_of(
    columns: Mapping[str, Sequence[Cell]], good: Sequence[bool] = (), methods: bool = False
) -> Grid:
    """The columns as rows; the last cell of one that is not `good` stands out."""
    rows = list(zip(*columns.values(), strict=True))
    states = ["done" if fine else "failed" for fine in good or [True] * len(rows)]
    made = (Row(row[0].text, state, row) for row, state in zip(rows, states, strict=True))
    return Grid(tuple(columns), tuple(made), methods)
