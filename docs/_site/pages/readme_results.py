"""Writes the README's table of results from the records of the studies that it links to."""

from pathlib import Path
from typing import NamedTuple

from gradwire.bench import human
from gradwire.bench.records.compare import group
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.study_facts import PERCENT, Facts
from gradwire.bench.report.study_grids import half_baseline
from gradwire.bench.studies.definitions import STUDIES
from pages.markdown import table, write_between
from pages.study_pages import CLAIMS, all_runs

BEGIN, END = "<!-- results: make table -->", "<!-- end of results -->"


class Result(NamedTuple):
    """A row: a method of a study, and how the README names its task and the method."""

    study: str
    spec: str
    task: str
    method: str
    best: bool = False
    """True for the best evaluation, where runs are long enough to overfit."""


ROWS = (
    Result("cifar10", "qsgd:bits=4", "ResNet-9, CIFAR-10", "`qsgd:bits=4`"),
    Result("cifar10", "efsign", "ResNet-9, CIFAR-10", "`efsign`"),
    Result(
        "late-resnet18",
        "efsign @ local=(qsparse:sync_every=2,delay=2)",
        "ResNet-18, CIFAR-10",
        "`efsign`, every 2 steps, 2 steps late",
    ),
    Result(
        "long-lstm",
        "powersgd:rank=1",
        "LSTM of 66 M, Penn Treebank, best perplexity",
        "`powersgd:rank=1`",
        best=True,
    ),
    Result("gpt-adamw", "int4", "GPT of 0.8 M, AdamW, bits per character", "`int4`"),
)


def write_into(readme: Path, results: Path) -> None:
    write_between(readme, BEGIN, END, results_table(results))


def results_table(results: Path) -> str:
    columns = ("task", "workers", "seeds", "method", "quality (dense)", "fewer bytes")
    rows = [_cells(row, results) for row in ROWS]
    return table((*columns, "step, against 16 bits"), rows, words=1)


def _cells(row: Result, results: Path) -> list[str]:
    claim = CLAIMS[row.study]
    runs = claim.records(STUDIES[row.study], all_runs(results))
    facts = claim.facts(runs)
    first = facts.runs(row.spec)[0]
    return [
        f"[{row.task}](docs/results/{row.study}.md)",
        str(first.workers),
        str(facts.seeds(row.spec)),
        row.method,
        _quality(facts, row, first.metric_name),
        human.digits(facts.ratio(row.spec)),
        _speed(facts, row.spec, [run for run in runs if run.rate == claim.rate]),
    ]


def _quality(facts: Facts, row: Result, metric: str | None) -> str:
    value = facts.best if row.best else facts.metric
    own, dense = value(row.spec), value(BASELINE)
    if metric in PERCENT:
        return f"{100 * own:.1f} % ({100 * dense:.1f})"
    return f"{human.digits(own)} ({human.digits(dense)})"


def _speed(facts: Facts, spec: str, runs: list[TrainRecord]) -> str:
    """Returns the speed of a step over that of a dense mean in 16 bits, marked if computed."""
    half = half_baseline(group(runs, lambda run: (run.spec, run.status)))
    assert half.step_ms is not None
    mark = " †" if half.computed else ""
    return f"{human.times(half.step_ms / 1e3 / facts.step_s(spec))}{mark}"
