"""The step time of many methods in one run, in turns, so that noise strikes all of them alike."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from laconic.bench.job import Job
from laconic.bench.race import Place, Race
from laconic.bench.records import BASELINE, StepRecord
from laconic.bench.step_records import StepCollector
from laconic.bench.summary import step_summary
from laconic.bench.tables import step_tables
from laconic.bench.workload import parameter_count
from laconic.bench.workloads.mlp import Mlp

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
    batch: int
    json_path: Path | None
    command: str

    def run(self, console: Console) -> bool:
        """Measures and shows the table; False if it was interrupted."""
        workload = Mlp(self.batch)
        # Dense comes first in every round, so that it is known when the others are compared to it.
        cases = sorted(self.cases, key=lambda case: case != BASELINE)
        job = Job(
            workload=f"mlp:batch_size={self.batch}",
            turns=tuple(cases) * ROUNDS,
            steps=-(-self.steps // ROUNDS),
            warmup=self.warmup,
        )
        race = Race(job, self.workers, self.rate, self.command, self.json_path)
        collect = partial(
            _collector, batch=self.batch, parameters=parameter_count(workload.build())
        )
        results = race.run(collect, console)
        records = [record for record in results.records if isinstance(record, StepRecord)]
        if records:
            _show(records, console)
        return not results.interrupted


def _collector(place: Place, batch: int, parameters: int) -> StepCollector:
    return StepCollector(place, batch, parameters, ROUNDS)


def _show(records: list[StepRecord], console: Console) -> None:
    for table in step_tables(records):
        console.print(table)
    console.print(step_summary(records), markup=False, highlight=False)
