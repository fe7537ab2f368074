"""The quality with which finished runs of every method ended, from the records of the studies."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.bench import human
from gradwire.bench.records.schema import BASELINE
from gradwire.bench.report.study_facts import Facts
from gradwire.spec import methods
from pages import study_pages
from pages.markdown import code, table

OTHERS = ("local=", "controller=", "side=update")
"""Options of cases whose quality is not that of the method alone."""


class Result(NamedTuple):
    """A case of a study beside the study's dense run, over all seeds."""

    study: str
    setting: str
    spec: str
    quality: str
    dense: str
    fewer_bytes: str
    seeds: int


def by_method(results: Path) -> dict[str, list[Result]]:
    """Returns the results of every method that has a finished run, in the order of studies."""
    found: dict[str, list[Result]] = {}
    for name, claim in study_pages.decided(results).items():
        facts = claim.facts(study_pages.study_runs(name, claim, results))
        for result in _results(name, facts):
            found.setdefault(_method(result.spec), []).append(result)
    return found


def text(results: Sequence[Result]) -> str:
    """Returns a table of results, or a sentence if there are none."""
    if not results:
        return "No finished run of a study is on record."
    lines = [
        (
            f"[{r.study}](../../results/{r.study}.md)",
            r.setting,
            code(r.spec),
            r.quality,
            r.dense,
            r.fewer_bytes,
            f"{r.seeds}",
        )
        for r in results
    ]
    columns = ("study", "task", "setting", "quality", "dense", "fewer bytes", "seeds")
    return (
        "How finished runs ended, beside dense training in the same study. Studies differ in "
        "length, and some were made to show where a method fails; their pages have the plots "
        f"and the caveats.\n\n{table(columns, lines, words=3)}"
    )


def _results(study: str, facts: Facts) -> Iterator[Result]:
    specs = dict.fromkeys(run.spec for run in facts.records if run.rate == facts.rate)
    for spec in specs:
        if _method(spec) not in methods() or any(option in spec for option in OTHERS):
            continue
        run = facts.runs(spec)[0]
        dense = facts.end() if BASELINE in specs else human.NO_VALUE
        fewer, seeds = human.times(facts.ratio(spec)), len(facts.runs(spec))
        setting = (
            f"{run.workload.removesuffix(' (simulated)')}, {run.workers} workers, {run.metric_name}"
        )
        yield Result(study, setting, spec, facts.end(spec), dense, fewer, seeds)


def _method(spec: str) -> str:
    """Returns the name of a case's method; of a pipeline, that of its first stage."""
    return spec.partition("@")[0].partition("|")[0].partition(":")[0].strip()
