"""A claim that a study tests: its text, the verdict, and the records that decide it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from gradwire.bench.records.compare import group
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.study_facts import Facts, MissingRunError
from gradwire.bench.studies.study import Study
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class Claim:
    """A claim and its verdict, whose figures are computed from the records.

    `holds` is the comparison that the verdict states. If new records contradict it, making the page
    fails, so that the text has to be changed.
    """

    title: str
    claim: str
    verdict: Callable[[Facts], str]
    holds: Callable[[Facts], bool]
    caveats: tuple[str, ...] = ()
    rate: str = "1gbit"
    workload: str | None = None
    """The workload and the steps of the records, if they are not those of the study."""
    steps: int | None = None

    def records(self, study: Study, records: Iterable[TrainRecord]) -> list[TrainRecord]:
        """Returns the records of the study's cases, once each, and each at its best learning rate.

        The records are those of the claim's setting.
        """
        return best_rates(self.all_rates(study, records))

    def all_rates(self, study: Study, records: Iterable[TrainRecord]) -> list[TrainRecord]:
        """Returns the records at all learning rates."""
        names = {self.workload} if self.workload else {f.workload for f in study.by_learning_rate()}
        setting, specs = (self.steps or study.steps, study.workers), set(study.cases)
        found = {
            (r.workload_spec, r.spec, r.seed, r.rate, r.status): r
            for r in records
            if r.workload_spec in names and (r.steps, r.workers) == setting and r.spec in specs
        }
        return list(found.values())

    def facts(self, records: Iterable[TrainRecord]) -> Facts:
        """Returns the figures of finished runs."""
        return Facts([r for r in records if r.status == "done"], self.rate)

    def text(self, name: str, facts: Facts) -> str:
        """Returns the verdict; raises ConfigError if the records contradict it."""
        try:
            if not self.holds(facts):
                raise ConfigError(f"study {name}: the records contradict its verdict; change it")
            return self.verdict(facts)
        except MissingRunError as error:
            return f"**Not decided**: {error}."


def best_rates(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Returns the runs of each case with the workload's setting that ends best on average."""
    chosen: dict[str, list[TrainRecord]] = {}
    for (spec, _), runs in group(records, lambda run: (run.spec, run.workload_spec)).items():
        if spec not in chosen or _quality(runs) > _quality(chosen[spec]):
            chosen[spec] = runs
    kept = {id(run) for runs in chosen.values() for run in runs}
    return [run for run in records if id(run) in kept]


def _quality(runs: Sequence[TrainRecord]) -> float:
    """Returns a mean that is higher for better runs, or the least possible without a metric."""
    known = [run.metric for run in runs if run.metric is not None and run.status == "done"]
    if not known:
        return -math.inf
    return -fmean(known) if runs[0].metric_better == "lower" else fmean(known)
