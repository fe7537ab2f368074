"""Generates the table of the studies that repeat a paper: their size, and what is on record."""

from collections.abc import Mapping
from pathlib import Path

from gradwire.bench import human
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.studies.claim import Claim
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.studies.paper_tables import GRACE_TASKS, GRAVAC_TABLES
from gradwire.bench.studies.study import Study
from gradwire.bench.workloads.base import parse_workload
from pages import study_pages
from pages.markdown import code, table

PAPERS: Mapping[str, tuple[str, ...]] = {
    "GRACE (Xu et al. 2021)": (*GRACE_TASKS, "error-feedback", "error-feedback-rates"),
    "GraVAC (Tyagi and Swany 2023)": (
        *GRAVAC_TABLES,
        "gravac-32",
        "gravac",
        "gravac-thresholds",
        "gravac-accordion",
        "gravac-lstm",
        "long-lstm",
    ),
    "CSER (Xie et al. 2020)": ("cser-cifar100", "cser"),
    "Qsparse-local-SGD (Basu et al. 2019)": ("qsparse-ptb", "qsparse-async", "qsparse"),
}
"""The studies of each paper; those of the paper's own networks come first."""


def page(results: Path) -> str:
    """Returns a table for each paper."""
    parts = []
    for paper, names in PAPERS.items():
        lines = [_line(name, STUDIES[name], results) for name in names]
        columns = ("study", "network", "runs", "steps of each", "time", "on record")
        parts += [f"### {paper}", table(columns, lines, words=2)]
    return "\n\n".join(parts)


def _line(name: str, study: Study, results: Path) -> tuple[str, ...]:
    total = len(study.cases) * len(study.seeds) * len(study.by_learning_rate())
    runs = _own_runs(name, study, results)
    finished = {(r.workload_spec, r.spec, r.seed) for r in runs if r.status == "done"}
    shown = (
        f"[{name}](../results/{name}.md)" if name in study_pages.decided(results) else code(name)
    )
    record = f"{len(finished)} of {total}" if finished else "not yet"
    network = parse_workload(study.workload).title
    return shown, network, f"{total}", f"{study.steps:,}", _time(runs, total), record


def _own_runs(name: str, study: Study, results: Path) -> list[TrainRecord]:
    """Returns the runs that decide a study's claim; without its own file of records, none."""
    if not (results / "studies" / f"{name}.jsonl").exists():
        return []
    claim = study_pages.CLAIMS.get(name) or Claim(name, "", str, bool)
    return claim.all_rates(study, study_pages.all_runs(results))


def _time(runs: list[TrainRecord], total: int) -> str:
    """Returns the time of all runs, one after the other, from those whose records have it."""
    once = {(r.workload_spec, r.spec, r.seed): r for r in runs if r.lockstep_ms and r.steps}
    if not once:
        return "not measured"
    seconds = [(r.lockstep_ms or 0) * (r.steps or 0) / 1e3 for r in once.values()]
    return human.duration_s(sum(seconds) / len(seconds) * total)
