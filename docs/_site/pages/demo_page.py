"""The page and the plot of `gradwire demo`: the held-out loss over the time of training."""

from pathlib import Path

from gradwire.bench.records.compare import train_setting
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.grid import train_grid
from gradwire.bench.runs.demo import verdict
from pages.markdown import GENERATED, fold
from pages.results import grid_table, raw_tables
from pages.study_plot import Race

PAGE, PLOT = "demo.md", "demo.svg"
TITLE = "The demo: six methods on four emulated hosts"


def records_of(results: Path) -> list[TrainRecord]:
    """Returns the records of the demo; none if it was not run."""
    path = results / "demo.jsonl"
    return [r for r in read([path]) if isinstance(r, TrainRecord)] if path.exists() else []


def texts(results: Path) -> dict[str, str]:
    """Returns the text of the page by its file name, if there are records."""
    records = records_of(results)
    if not records:
        return {}
    parts = [
        GENERATED,
        f"# {TITLE}",
        f"{train_setting(records[0]).words()}.",
        f"![Held-out loss over the time of training]({PLOT})",
        *verdict(records),
        grid_table(train_grid(records)),
        "One seed and one small model: the demo shows what slow links cost, not which method is "
        "best. `gradwire demo --json results/demo.jsonl` repeats it.",
        fold("Every run of `results/demo.jsonl`", raw_tables(results / "demo.jsonl", results)),
    ]
    return {PAGE: "\n\n".join(parts) + "\n"}


def plots(results: Path) -> dict[str, tuple[Race, ...]]:
    """Returns the plot by its file name, if there are records."""
    races = tuple(
        Race(
            record.spec,
            tuple(round(point.time_s, 3) for point in record.points if point.time_s > 0),
            tuple(point.loss for point in record.points if point.time_s > 0),
        )
        for record in records_of(results)
        if record.points
    )
    return {PLOT: races} if races else {}
