"""A claim that a study tests: its text, the verdict, and the records that decide it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.study_facts import Facts, MissingRunError
from gradwire.bench.studies.study import Study
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class Claim:
    """What is claimed, and what the records say: the verdict's figures are computed from them.

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
        """Returns the records of the study's cases, of its setting, once each."""
        setting = self.workload or study.workload, self.steps or study.steps, study.workers
        specs = set(study.cases)
        found = {
            (r.spec, r.seed, r.rate, r.status): r
            for r in records
            if (r.workload_spec, r.steps, r.workers) == setting and r.spec in specs
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
