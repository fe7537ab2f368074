"""`gradwire bench train`: trains with many methods and seeds; compares quality, time and bytes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gradwire.bench.machine import check_device
from gradwire.bench.records.compare import Target, median_of, parse_target
from gradwire.bench.records.schema import BASELINE, COMPUTE, TrainRecord
from gradwire.bench.report.summary import train_summary
from gradwire.bench.report.tables import train_tables
from gradwire.bench.report.write import write_report
from gradwire.bench.runs import resume
from gradwire.bench.runs.cluster_run import ClusterRun, Ending, Results
from gradwire.bench.runs.progress import TensorBoardWriter, check_installed
from gradwire.bench.runs.train_records import TrainCollector
from gradwire.bench.worker.protocol import Job
from gradwire.bench.workloads.base import Workload, parse_workload
from gradwire.checks import check_number, check_whole
from gradwire.errors import ConfigError
from gradwire.testbed.hosts import Testbed

CASES = (
    COMPUTE,
    BASELINE,
    "torch-fp16",
    "qsgd:bits=4",
    "topk:ratio=0.01",
    "powersgd:rank=4",
    "efsign",
)
_EVALUATIONS = 20


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Trains every case with every seed; skips those that the file has already."""

    workload: str
    cases: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    rate: str | None
    steps: int | None = None
    epochs: float | None = None
    warmup: int = 3
    evaluate_every: int | None = None
    target: str | None = None
    data: Path | None = None
    device: str = "cpu"
    again: bool = False
    json_path: Path | None = None
    output: Path | None = None
    tensorboard: Path | None = None
    command: str
    commit: str | None = None

    def run(self, console: Console) -> Ending:
        """Trains, shows the table and writes the page."""
        check_device(self.device)
        if self.tensorboard is not None:
            check_installed()
        # Used for its name, metric and number of examples; the workers build their own.
        workload = parse_workload(self.workload, self.data)
        jobs = self._jobs(workload)
        finished_runs = resume.finished_runs(self.json_path, self._setting(workload, jobs[0]))
        records, endings = [] if self.again else finished_runs, set[Ending]()
        for job in jobs:
            case_order = self._remaining(job, resume.finished_cases(records, job.seed), console)
            if case_order and "interrupted" not in endings:
                results = self._run_seed(
                    replace(job, case_order=case_order), workload, records, console
                )
                records += [r for r in results.records if isinstance(r, TrainRecord)]
                endings.add(results.ending)
        self._show(records, console)
        return _worst(endings)

    def _remaining(self, job: Job, finished_cases: set[str], console: Console) -> tuple[str, ...]:
        for case in (case for case in job.case_order if case in finished_cases):
            line = f"{case}, seed {job.seed}: done already in {self.json_path}; --again repeats it"
            _print_line(console, line)
        return tuple(case for case in job.case_order if case not in finished_cases)

    def _jobs(self, workload: Workload) -> list[Job]:
        """Returns one job per seed; raises ConfigError for all wrong settings."""
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ConfigError(f"bench train: seeds must be different numbers, got {self.seeds}")
        self._target(workload)
        steps = self._steps(workload)
        every = (
            max(1, steps // _EVALUATIONS) if self.evaluate_every is None else self.evaluate_every
        )
        first = Job(
            workload=self.workload,
            case_order=baselines_first(self.cases),
            steps=steps,
            warmup=self.warmup,
            evaluate_every=every,
            data=None if self.data is None else str(self.data.absolute()),
            device=self.device,
        )
        return [replace(first, seed=seed) for seed in self.seeds]

    def _target(self, workload: Workload) -> Target | None:
        metric, better = workload.metric
        return None if self.target is None else parse_target(self.target, metric, better)

    def _steps(self, workload: Workload) -> int:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"bench train: expected steps or epochs, got {self.steps} and {self.epochs}"
            )
        # Computed in any case: missing data raises here, and not on every host.
        batches = workload.examples() // workload.batch_size
        if self.steps is not None:
            return self.steps
        check_whole("bench train", "workers", self.workers, 1)
        check_number("bench train", "epochs", self.epochs)
        assert self.epochs is not None
        if self.epochs <= 0:
            raise ConfigError(f"bench train: epochs must be positive, got {self.epochs:g}")
        return round(self.epochs * batches / self.workers)

    def _setting(self, workload: Workload, job: Job) -> resume.Setting:
        shaped = self.rate is not None and Testbed.reason_unavailable() is None
        return resume.Setting(
            workload.heading,
            self.workload,
            self.workers,
            self.rate,
            shaped,
            job.steps,
            self.device,
        )

    def _run_seed(
        self, job: Job, workload: Workload, known: Sequence[TrainRecord], console: Console
    ) -> Results:
        board = None if self.tensorboard is None else TensorBoardWriter(self.tensorboard, job.seed)
        collect = partial(
            TrainCollector,
            job=job,
            workload=workload,
            target=self._target(workload),
            compute_ms=median_of(record.step_ms for record in known if record.spec == COMPUTE),
        )
        cluster_run = ClusterRun(
            job,
            self.workers,
            self.rate,
            self.command,
            self.json_path,
            self.commit,
            board.show if board else None,
        )
        _print_line(console, f"{workload.heading}, seed {job.seed}, {job.steps:,} steps")
        try:
            return cluster_run.run(collect, console)
        finally:
            if board is not None:
                board.close()

    def _show(self, records: list[TrainRecord], console: Console) -> None:
        if not records:
            return
        for table in train_tables(records):
            console.print(table)
        _print_line(console, train_summary(records))
        if self.output is not None:
            write_report(records, self.output)
            _print_line(console, f"Report: {self.output}")


def baselines_first(cases: Iterable[str]) -> tuple[str, ...]:
    """Sorts the cases so that those that others are compared with come first."""
    return tuple(sorted(cases, key=lambda case: (case != COMPUTE, case != BASELINE)))


def _worst(endings: Collection[Ending]) -> Ending:
    order: tuple[Ending, ...] = ("interrupted", "failed")
    return next((ending for ending in order if ending in endings), "done")


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
