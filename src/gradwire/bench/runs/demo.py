"""`gradwire demo`: dense against compressed training on emulated hosts with slow links."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from gradwire.bench.cases.parse import split_cases
from gradwire.bench.records.compare import LOSS, Target
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.quality import quality_summary
from gradwire.bench.report.summary import train_summary
from gradwire.bench.report.tables import train_tables
from gradwire.bench.report.write import write_report
from gradwire.bench.runs.cluster_run import ClusterRun, Ending
from gradwire.bench.runs.train_records import TrainCollector
from gradwire.bench.worker.protocol import Job
from gradwire.bench.workloads.charlm import CharLm

CASES = (BASELINE, "torch-fp16", "qsgd:bits=4", "topk:ratio=0.01", "powersgd:rank=4", "efsign")
# Dense training reaches it in less than half of the steps, sparse training within all of them.
TARGET = Target(LOSS, 2.45, "lower")
_WARMUP = 3
_EVALUATE_EVERY = 5
CLOCK = (
    "The loss is that of held-out text, and times are those of training alone: "
    "the clock stands still while a model is evaluated."
)


@dataclass(frozen=True)
class Demo:
    workers: int
    rate: str | None
    steps: int
    output: Path
    json_path: Path | None
    command: str
    seed: int = 0

    def run(self, console: Console) -> Ending:
        """Trains all cases, shows the table and writes the page."""
        job = Job(
            workload="charlm",
            case_order=split_cases(CASES),
            steps=self.steps,
            warmup=_WARMUP,
            evaluate_every=_EVALUATE_EVERY,
            seed=self.seed,
        )
        cluster_run = ClusterRun(job, self.workers, self.rate, self.command, self.json_path)
        collect = partial(TrainCollector, job=job, workload=CharLm(), target=TARGET)
        results = cluster_run.run(collect, console)
        records = [record for record in results.records if isinstance(record, TrainRecord)]
        if records:
            self._show(records, console)
        return results.ending

    def _show(self, records: list[TrainRecord], console: Console) -> None:
        for table in train_tables(records):
            console.print(table)
        for line in verdict(records):
            console.print(line, markup=False, highlight=False)
        write_report(records, self.output)
        console.print(f"Report: {self.output}", markup=False, highlight=False, soft_wrap=True)


def verdict(records: Sequence[TrainRecord]) -> list[str]:
    """Returns lines that compare at equal loss and at equal quality, and name what failed."""
    lines = [f"At equal loss: {train_summary(records)}"]
    if (quality := quality_summary(records)) is not None:
        lines.append(quality)
    for record in records:
        if record.status == "failed":
            reason = (record.error or "no reason is known").strip().splitlines()[0]
            lines.append(f"Failed: {record.spec}: {reason}")
    return [*lines, CLOCK]
