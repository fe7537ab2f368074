"""Terminal tables: results by setting, the catalogue of methods, and the workloads."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gradwire.bench.records.compare import group, kernel_setting, step_setting, train_setting
from gradwire.bench.records.schema import BASELINE, KernelRecord, StepRecord, TrainRecord
from gradwire.bench.report.grid import (
    BOUND_COLUMNS,
    Grid,
    kernel_grid,
    step_grid,
    train_grid,
)
from gradwire.bench.report.run_lengths import best_length_grid, longest
from gradwire.bench.report.study_grids import quality_grid, time_grid
from gradwire.catalogue import Row
from gradwire.identity import PACKAGE

_STATUS_STYLE = {"done": "", "failed": "red", "diverged": "red", "interrupted": "yellow"}


def train_tables(records: Sequence[TrainRecord]) -> list[Table]:
    groups = group(records, train_setting)
    return [_table(setting.words(), train_grid(runs)) for setting, runs in groups.items()]


def study_tables(records: Sequence[TrainRecord]) -> list[Table]:
    """Draws two views of every workload: quality at the end of the schedule, then the times.

    Where cases were trained at several lengths, these are of the longest, and a third view has the
    times at the best length.
    """
    tables = []
    for runs in group(longest(records), _schedule).values():
        words = train_setting(runs[0]).words().partition(", links")[0]
        title = f"Quality at the end of the schedule: {runs[0].workload_spec}; {words}"
        tables.append(_table(title, quality_grid(runs)))
        for setting, timed in group(runs, train_setting).items():
            rate = setting.links.words().partition(", ")[2]
            steps = "" if setting.steps is None else f" of {setting.steps:,} steps"
            schedule = f"Times, {rate}, in the workload's own schedule{steps}"
            tables.append(_table(schedule, time_grid(timed)))
    for runs in group(records, lambda r: (r.workload_spec, r.workers, r.device, r.rate)).values():
        if (grid := best_length_grid(runs)) is not None:
            rate = train_setting(runs[0]).links.words().partition(", ")[2]
            tables.append(_table(f"Times, {rate}, at the best length of run", grid))
    return tables


def _schedule(record: TrainRecord) -> tuple[object, ...]:
    return record.workload_spec, record.workers, record.steps, record.device


def step_tables(records: Sequence[StepRecord]) -> list[Table]:
    groups = group(records, step_setting)
    return [
        table
        for setting, runs in groups.items()
        for table in _step_tables(setting.words(), step_grid(runs))
    ]


def _step_tables(title: str, grid: Grid) -> list[Table]:
    """Draws bounds and memory as a table of their own: one would be too wide for a terminal."""
    if "bound" not in grid.columns:
        return [_table(title, grid)]
    others = ("steps", "peak memory", *BOUND_COLUMNS)
    times = [name for name in grid.columns if name not in others]
    bounds = grid.select("method", "step", *others)
    return [_table(title, grid.select(*times)), _table("Bounds of a step", bounds)]


def kernel_tables(records: Sequence[KernelRecord]) -> list[Table]:
    groups = group(records, kernel_setting)
    return [_table(setting.words(), kernel_grid(rows)) for setting, rows in groups.items()]


def _table(title: str, grid: Grid) -> Table:
    # Text, not str: a spec such as "x[bits=4]" would be parsed as markup.
    # A title stays on one line even if it is longer than its table.
    heading = Text(title, no_wrap=True, overflow="ignore")
    table = Table(
        title=heading, title_justify="left", pad_edge=False, collapse_padding=True, box=None
    )
    first, *others = grid.columns
    # In a narrow terminal the method wraps; a truncated number would be wrong.
    table.add_column(Text(first), overflow="fold", min_width=12, vertical="top")
    for name in others:
        table.add_column(Text(_two_lines(name)), justify="right", no_wrap=True)
    for row in grid.rows:
        style = "dim" if row.spec == BASELINE else _STATUS_STYLE[row.status]
        table.add_row(*(Text(cell.text) for cell in row.cells), style=style)
    return table


def _two_lines(name: str) -> str:
    """Breaks a name at the space nearest to its middle."""
    spaces = [index for index, letter in enumerate(name) if letter == " "]
    if len(name) <= 8 or not spaces:
        return name
    at = min(spaces, key=lambda index: abs(index - len(name) / 2))
    return f"{name[:at]}\n{name[at + 1 :]}"


def methods_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in (
        "method",
        "family",
        "bits an\nelement",
        "unbiased or\ncontraction",
        "memory",
        "exchange",
    ):
        table.add_column(Text(name), no_wrap=True)
    table.add_column("paper", no_wrap=True, overflow="ellipsis", max_width=24)
    for row in rows:
        cells = [row.spec, row.family, f"{row.bits_per_element:g}", _bias_kind(row)]
        # The arXiv number is in the README's table and in --json; columns are few here.
        paper = row.paper.partition(", arXiv")[0]
        if row.distribution != PACKAGE:
            paper = f"[{row.distribution}] {paper}"
        table.add_row(*(Text(cell) for cell in [*cells, row.memory, row.exchange, paper]))
    return table


def _bias_kind(row: Row) -> str:
    if row.unbiased and row.contraction:
        return "both"
    return "unbiased" if row.unbiased else "contraction" if row.contraction else ""
