"""The step time of many methods in one run, in turns, so that noise strikes all of them alike."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from laconic.bench.device import check_device
from laconic.bench.hosts.job import Job
from laconic.bench.races.race import Ending, Race
from laconic.bench.races.step_records import StepCollector
from laconic.bench.races.train import baselines_first
from laconic.bench.records.kinds import BASELINE, StepRecord
from laconic.bench.report.summary import step_summary
from laconic.bench.report.tables import step_tables
from laconic.bench.work.workload import parameter_count, parse_workload

CASES = (
    BASELINE,
    "torch-fp16",
    "torch-powersgd:rank=1",
    "none",
    "fp16",
    "efsign",
    "qsgd:bits=4",
    "topk:ratio=0.01",
    "randomk:ratio=0.01",
    "powersgd:rank=1",
)
ROUNDS = 3


@dataclass(frozen=True)
class StepBench:
    """`steps` timed steps of every case, in `ROUNDS` blocks; every block has its own warm-up."""

    cases: tuple[str, ...]
    workers: int
    rate: str | None
    steps: int
    warmup: int
    batch: int | None
    json_path: Path | None
    command: str
    workload: str = "mlp"
    data: Path | None = None
    device: str = "cpu"
    commit: str | None = None

    def run(self, console: Console) -> Ending:
        """Measures and shows the table."""
        check_device(self.device)
        workload = parse_workload(self._workload_spec(), self.data)
        job = Job(
            workload=self._workload_spec(),
            turns=baselines_first(self.cases) * ROUNDS,
            steps=-(-self.steps // ROUNDS),
            warmup=self.warmup,
            data=None if self.data is None else str(self.data),
            device=self.device,
        )
        # Data that is missing is missed here, and not on every host.
        workload.examples()
        race = Race(job, self.workers, self.rate, self.command, self.json_path, self.commit)
        collect = partial(
            StepCollector,
            batch=workload.batch_size,
            parameters=parameter_count(workload.build()),
            rounds=ROUNDS,
            workload=workload.heading,
            device=self.device,
        )
        results = race.run(collect, console)
        records = [record for record in results.records if isinstance(record, StepRecord)]
        if records:
            _show(records, console)
        return results.ending

    def _workload_spec(self) -> str:
        if self.batch is None:
            return self.workload
        return f"{self.workload}{',' if ':' in self.workload else ':'}batch_size={self.batch}"


def _show(records: list[StepRecord], console: Console) -> None:
    for table in step_tables(records):
        console.print(table)
    console.print(step_summary(records), markup=False, highlight=False)
