"""Makes tables of the records in results/: a section for a file, a table for a setting."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gradwire.bench.predictions.forecast_records import read_predictions
from gradwire.bench.records.compare import group, kernel_setting, step_setting, train_setting
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import KINDS, KernelRecord, Record, StepRecord, TrainRecord
from gradwire.bench.report.grid import Grid, kernel_grid, step_grid, train_grid
from gradwire.bench.report.summary import kernel_summary, step_summary, train_summary
from pages import other_results
from pages.markdown import code, table

TITLES = {
    "train": "Time to accuracy",
    "step": "Step times",
    "gpu-step": "Step times on a GPU",
    "gpu-step-mps": "Step times on a GPU that four workers use at the same time (MPS)",
    "kernels-cpu": "Kernels on a CPU",
    "kernels-h200": "Kernels on a GPU",
    "pipeline": "Pipeline stages",
    "adaptive/levels": "Two levels of a sparsifier",
    "validation": "Predicted and measured steps",
    "local": "Talking rarely",
    "adaptive": "Compression that sets itself",
    "integrations": "Integrations",
    "reliability/faults": "Injected faults",
    "reliability/elastic": "Replicas that are killed and join again",
    "reliability/fuzz": "Hostile bytes",
}
"""Titles of files, by the name of the file or its folder, in the order of the page."""

PRIVATE = ("--json", "--plot", "--commit", "--data", "--output", "-o", "--tensorboard")
"""Options that name local paths of the machine that made a record."""

FACTS = ("gpu", "cpu", "cores", "torch", "numba", "triton", "commit")

R = TypeVar("R", TrainRecord, StepRecord, KernelRecord)


def tables(results: Path) -> str:
    """Returns a section for every file of records."""
    files = sorted(results.rglob("*.jsonl"), key=lambda path: _order(path.relative_to(results)))
    return "\n\n".join(part for file in files for part in section(file, results))


def _topic(path: Path) -> str | None:
    """Returns the key of a file's title, if it has one."""
    own = path.with_suffix("").as_posix()
    return next((name for name in (own, path.parts[0]) if name in TITLES), None)


def _order(path: Path) -> tuple[int, str]:
    topic = _topic(path)
    return (len(TITLES) if topic is None else [*TITLES].index(topic), path.as_posix())


def title(path: Path) -> str:
    """Returns the heading of a file in results/; files of a folder keep their names."""
    own, topic = path.with_suffix("").as_posix(), _topic(path)
    if topic is None:
        return own
    return TITLES[topic] if topic == own else f"{TITLES[topic]}: {path.stem}"


def section(path: Path, results: Path) -> Iterator[str]:
    """Yields the heading and the tables of a file of records."""
    yield f"## {title(path.relative_to(results))}"
    yield f"`results/{path.relative_to(results).as_posix()}`"
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    kinds = {row.get("kind") for row in rows}
    if kinds <= set(KINDS):
        yield from _runs(read([path]))
    elif kinds == {"forecast"}:
        yield from other_results.forecasts(read_predictions(path))
    else:
        yield from other_results.tables(rows)


def raw_tables(path: Path, results: Path) -> str:
    """Returns the tables of a file for a fold: headings too low for the table of contents."""
    parts = list(section(path, results))[1:]
    return "\n\n".join(f"#{part}" if part.startswith("### ") else part for part in parts)


def _runs(records: Sequence[Record]) -> Iterator[str]:
    trains = [r for r in records if isinstance(r, TrainRecord)]
    steps = [r for r in records if isinstance(r, StepRecord)]
    kernels = [r for r in records if isinstance(r, KernelRecord)]
    yield from _grids(trains, train_setting, train_grid, train_summary)
    yield from _grids(steps, lambda r: (step_setting(r), r.command), step_grid, step_summary)
    yield from _grids(kernels, kernel_setting, kernel_grid, kernel_summary)


def _grids(
    records: Sequence[R],
    same: Callable[[R], Any],
    grid: Callable[[Sequence[R]], Grid],
    summary: Callable[[Sequence[R]], str],
) -> Iterator[str]:
    """Yields a table for each setting and machine, since times of others are not comparable."""
    for runs in group(records, lambda r: (same(r), str(r.machine))).values():
        yield f"### {setting_words(runs[0])}"
        yield summary(runs)
        yield grid_table(grid(runs))
        yield made_by({r.command: None for r in runs}, runs[0].machine)


def setting_words(record: Record) -> str:
    if isinstance(record, TrainRecord):
        return train_setting(record).words()
    if isinstance(record, StepRecord):
        return step_setting(record).words()
    return kernel_setting(record).words()


def grid_table(grid: Grid) -> str:
    lines = [[code(row.spec), *(cell.text for cell in row.cells[1:])] for row in grid.rows]
    return table(grid.columns, lines)


def made_by(commands: Iterable[str], machine: dict[str, str]) -> str:
    """Returns the commands that made the records, and the machine."""
    short = {name: machine[name] for name in FACTS if name in machine}
    if "commit" in short:
        short["commit"] = short["commit"][:12]
    facts = ", ".join(f"{name} {value}" for name, value in short.items())
    lines = dict.fromkeys(code(public(command)) for command in commands)
    return "  \n".join([*lines, facts])


def public(command: str) -> str:
    """Removes options that name local paths from a command."""
    words, kept = shlex.split(command), []
    while words:
        word = words.pop(0)
        if word in PRIVATE:
            words = words[1:]
        elif not word.startswith(tuple(f"{name}=" for name in PRIVATE)):
            kept.append(word)
    return shlex.join(kept)
