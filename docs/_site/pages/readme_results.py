"""Writes the README's figures from records: those of the demo, and of the studies it links to."""

from pathlib import Path
from typing import NamedTuple

from gradwire.bench import human
from gradwire.bench.records.compare import group
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.study_facts import PERCENT, Facts
from gradwire.bench.report.study_grids import half_baseline
from gradwire.bench.studies.definitions import STUDIES
from pages import demo_page
from pages.markdown import table, write_between
from pages.study_pages import CLAIMS, all_runs

BEGIN, END = "<!-- results: make table -->", "<!-- end of results -->"


DEMO_BEGIN, DEMO_END = "<!-- demo: make table -->", "<!-- end of the demo -->"


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
    write_between(readme, DEMO_BEGIN, DEMO_END, demo_text(results))


def demo_text(results: Path) -> str:
    """Returns the plot of the demo and its result, at equal loss and at equal steps."""
    runs = {run.spec: run for run in demo_page.records_of(results)}
    dense, half = runs[BASELINE], runs["torch-fp16"]
    fast, exact = runs["powersgd:rank=4"], runs["qsgd:bits=4"]
    reached = [human.duration_s(run.time_to_target_s) for run in (fast, half, dense)]
    ends = [human.digits(run.final_loss) for run in (dense, fast, exact)]
    return (
        "![Held-out loss of six methods over the time of training](docs/results/demo.svg)\n\n"
        "`make demo`: a character model on four emulated hosts with links of 100 Mbit/s, one seed. "
        f"`{fast.spec}` is at a held-out loss of\n{human.digits(dense.target_loss)} after "
        f"[{reached[0]}](docs/results/demo.md), 16-bit gradients after {reached[1]}, 32-bit ones "
        f"after {reached[2]}. After the same {dense.points[-1].step} steps dense\ntraining is at "
        f"{ends[0]}, `{fast.spec}` at {ends[1]} and `{exact.spec}` at {ends[2]}: not every method "
        "pays, and [the studies](docs/results/index.md) say\nwhich did, and which claims did not "
        "hold."
    )


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
