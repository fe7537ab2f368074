"""`gradwire bench train`: trains with many methods and seeds; compares quality, time and bytes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gradwire.bench.machine import check_device
from gradwire.bench.records.compare import Target, middle, parse_target
from gradwire.bench.records.schema import BASELINE, COMPUTE, TrainRecord
from gradwire.bench.report.summary import train_summary
from gradwire.bench.report.tables import train_tables
from gradwire.bench.report.write import write_report
from gradwire.bench.runs import resume
from gradwire.bench.runs.cluster_run import Ending, Race, Results
from gradwire.bench.runs.progress import Board, check_installed
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
_LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Every case with every seed; those that the file has already are not run again."""

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
        # For its name, its metric and its number of examples; those who train have their own.
        workload = parse_workload(self.workload, self.data)
        jobs = self._jobs(workload)
        earlier = resume.earlier(self.json_path, self._setting(workload, jobs[0]))
        records, endings = [] if self.again else earlier, set[Ending]()
        for job in jobs:
            turns = self._left(job, resume.done(records, job.seed), console)
            if turns and "interrupted" not in endings:
                results = self._race(replace(job, turns=turns), workload, records, console)
                records += [r for r in results.records if isinstance(r, TrainRecord)]
                endings.add(results.ending)
        self._show(records, console)
        return _worst(endings)

    def _left(self, job: Job, done: set[str], console: Console) -> tuple[str, ...]:
        for case in (case for case in job.turns if case in done):
            line = f"{case}, seed {job.seed}: done already in {self.json_path}; --again repeats it"
            _say(console, line)
        return tuple(case for case in job.turns if case not in done)

    def _jobs(self, workload: Workload) -> list[Job]:
        """One a seed; whatever is wrong with them is found out before the first."""
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ConfigError(f"bench train: seeds must be different numbers, got {self.seeds}")
        self._target(workload)
        steps = self._steps(workload)
        every = max(1, steps // _LOOKS) if self.evaluate_every is None else self.evaluate_every
        first = Job(
            workload=self.workload,
            turns=baselines_first(self.cases),
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
                f"bench train: say steps or epochs, got {self.steps} and {self.epochs}"
            )
        # Asked in any case: data that is missing is missed here, and not on every host.
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

    def _race(
        self, job: Job, workload: Workload, known: Sequence[TrainRecord], console: Console
    ) -> Results:
        board = None if self.tensorboard is None else Board(self.tensorboard, job.seed)
        collect = partial(
            TrainCollector,
            job=job,
            workload=workload,
            target=self._target(workload),
            compute_ms=middle(record.step_ms for record in known if record.spec == COMPUTE),
        )
        race = Race(
            job,
            self.workers,
            self.rate,
            self.command,
            self.json_path,
            self.commit,
            board.show if board else None,
        )
        _say(console, f"{workload.heading}, seed {job.seed}, {job.steps:,} steps")
        try:
            return race.run(collect, console)
        finally:
            if board is not None:
                board.close()

    def _show(self, records: list[TrainRecord], console: Console) -> None:
        if not records:
            return
        for table in train_tables(records):
            console.print(table)
        _say(console, train_summary(records))
        if self.output is not None:
            write_report(records, self.output)
            _say(console, f"Report: {self.output}")


def baselines_first(cases: Iterable[str]) -> tuple[str, ...]:
    """The order in which what others are compared with is known when they are."""
    return tuple(sorted(cases, key=lambda case: (case != COMPUTE, case != BASELINE)))


def _worst(endings: Collection[Ending]) -> Ending:
    order: tuple[Ending, ...] = ("interrupted", "failed")
    return next((ending for ending in order if ending in endings), "done")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
