"""`gradwire study`: runs studies, several at a time in separate processes, until a time limit."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from gradwire.bench import human
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.machine import check_device, device_facts, enable_tf32, machine_facts
from gradwire.bench.predictions.measured_model import MeasuredModel, measure_workload
from gradwire.bench.records.files import append, check_writable, read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.tables import study_tables
from gradwire.bench.report.write import write_report
from gradwire.bench.runs.cluster_run import Ending
from gradwire.bench.studies.device_lock import DeviceLock
from gradwire.bench.studies.one_clock import clock_key, compute_times
from gradwire.bench.studies.run import CommandSettings, Outcome, Run, TimeLimitReached, runs_of
from gradwire.bench.studies.study import Study
from gradwire.bench.time_left import TimeLeft
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class _ProcessRunner:
    """Runs studies in processes of their own, which share one device lock."""

    setting: CommandSettings
    measured_models: Mapping[str, MeasuredModel]
    end_s: float
    folder: Path

    def run_in_process(self, run: Run) -> tuple[Run, Outcome, float]:
        """Starts a new process for the run, so that no run is affected by an earlier one."""
        start_s = time.monotonic()
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        measured = self.measured_models[run.study.workload]
        args = sender, run, self.setting, measured, self.end_s, self.folder
        process = context.Process(target=_run_in_process, args=args)
        process.start()
        sender.close()
        try:
            outcome: Outcome = receiver.recv()
        except EOFError:
            process.join()
            outcome = f"its process ended with {process.exitcode}"
        process.join()
        return run, outcome, time.monotonic() - start_s


def in_processes(
    runs: Sequence[Run],
    setting: CommandSettings,
    measured_models: Mapping[str, MeasuredModel],
    end_s: float,
    jobs: int,
) -> Iterator[tuple[Run, Outcome, float]]:
    """Yields every run with its outcome and its seconds, as they end; runs `jobs` at a time."""
    on_cpu = {spec: measured.to("cpu") for spec, measured in measured_models.items()}
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        runner = _ProcessRunner(setting, on_cpu, end_s, Path(folder))
        for done in as_completed([pool.submit(runner.run_in_process, run) for run in runs]):
            yield done.result()


def _run_in_process(
    sender: Connection,
    run: Run,
    setting: CommandSettings,
    measured: MeasuredModel,
    end_s: float,
    folder: Path,
) -> None:
    """Runs in a process of its own and sends the outcome."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        enable_tf32()
    device_lock = DeviceLock(folder, setting.device)
    sender.send(run.outcome(setting, measured.to(setting.device), end_s, device_lock))


@dataclass(frozen=True)
class StudyBench:
    """Runs studies; skips runs that `json_path` has already, so that a study can resume.

    With several `jobs` that many runs take place at a time, each in its own process.
    """

    studies: tuple[Study, ...]
    setting: CommandSettings
    json_path: Path
    minutes: float
    jobs: int = 1
    page: Path | None = None
    """The HTML page that is written at the end, of all records in the file."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"study: minutes must be positive, got {self.minutes}")
        if self.jobs < 1:
            raise ConfigError(f"study: jobs must be at least 1, got {self.jobs}")
        for study in self.studies:
            if study.steps < 1:
                raise ConfigError(f"study: steps must be at least 1, got {study.steps}")
            if study.workers < 1:
                raise ConfigError(f"study: workers must be at least 1, got {study.workers}")
            for case in study.cases:
                parse_case(case)

    def run(self, console: Console) -> Ending:
        """Runs all remaining runs; writes the records of each when it ends."""
        check_device(self.setting.device)
        check_writable(self.json_path)
        if self.setting.device == "cuda":
            enable_tf32()
        end_s = time.monotonic() + 60 * self.minutes
        remaining = self._remaining()
        measured_models = self._subjects(remaining)
        late = failed = ended = 0
        time_left = TimeLeft()
        for run, outcome, took_s in self._outcomes(remaining, measured_models, end_s):
            if isinstance(outcome, TimeLimitReached):
                late += 1
            elif isinstance(outcome, str):
                failed += 1
                _print_line(console, f"{run.case}, seed {run.seed}: {outcome}")
            else:
                for record in outcome:
                    append(self.json_path, record)
                ended += 1
                left = time_left.words(ended, len(remaining), 60 * self.minutes)
                _print_line(console, f"{_describe(outcome[0])}; {took_s:.1f} s{left}")
        if late:
            _print_line(console, f"The time limit is reached; {late} runs remain.")
        for table in study_tables(self._records()):
            console.print(table)
        if self.page is not None:
            write_report(read([self.json_path]), self.page)
            _print_line(console, f"The page is {self.page}")
        return "failed" if failed else "interrupted" if late else "done"

    def _remaining(self) -> list[Run]:
        """Returns the runs that are not finished, each once."""
        finished = self._finished()
        remaining = {_key(run): run for study in self.studies for run in runs_of(study)}
        return [run for run in remaining.values() if not finished >= _keys_by_rate(run)]

    def _records(self) -> list[TrainRecord]:
        """Returns the records of these studies in the file, of this device."""
        settings = {
            (s.workload, s.steps, s.workers, case) for s in self.studies for case in s.cases
        }
        return [
            r
            for r in read([self.json_path])
            if isinstance(r, TrainRecord)
            and r.device == self.setting.device
            and (r.workload_spec, r.steps, r.workers, r.spec) in settings
        ]

    def _finished(self) -> set[tuple[object, ...]]:
        """Returns the keys of finished runs, including those that diverged."""
        return {
            (r.workload_spec, r.steps, r.workers, r.spec, r.seed, r.rate)
            for r in read([self.json_path])
            if isinstance(r, TrainRecord)
            and r.status in ("done", "diverged")
            and r.device == self.setting.device
        }

    def _subjects(self, runs: list[Run]) -> dict[str, MeasuredModel]:
        """Measures the model of each workload, before any training starts."""
        specs = dict.fromkeys(run.study.workload for run in runs)
        data, device = self.setting.data, self.setting.device
        found = {spec: measure_workload(parse_workload(spec, data, device)) for spec in specs}
        recorded = compute_times(
            r for r in read([self.json_path]) if isinstance(r, TrainRecord) and r.device == device
        )
        machine = {**machine_facts(), **device_facts(device)}
        # A study that resumes keeps the compute time of its first session.
        for spec, measured in found.items():
            compute_ms = recorded.setdefault(
                clock_key(spec, device, machine), measured.compute.compute_s * 1e3
            )
            found[spec] = measured.with_compute_s(compute_ms / 1e3)
        return found

    def _outcomes(
        self, runs: list[Run], measured_models: dict[str, MeasuredModel], end_s: float
    ) -> Iterator[tuple[Run, Outcome, float]]:
        """Yields every run with its records, or the reason for their absence, and its seconds."""
        if self.jobs > 1:
            yield from in_processes(runs, self.setting, measured_models, end_s, self.jobs)
            return
        for run in runs:
            start_s = time.monotonic()
            outcome = run.outcome(self.setting, measured_models[run.study.workload], end_s)
            yield run, outcome, time.monotonic() - start_s
            # Graphs of a finished run must not be freed while those of the next are captured.
            gc.collect()


def _key(run: Run) -> tuple[object, ...]:
    study = run.study
    return study.workload, study.steps, study.workers, run.case, run.seed, run.rates


def _keys_by_rate(run: Run) -> set[tuple[object, ...]]:
    """Returns the keys by which `_finished` lists a run, one per rate."""
    *common, _ = _key(run)
    return {(*common, rate) for rate in run.rates}


def _describe(record: TrainRecord) -> str:
    metric = human.digits(record.metric) if record.metric is not None else "none"
    ratio = human.digits(record.ratio) if record.ratio is not None else "no"
    what = f"{record.spec}, seed {record.seed}: {record.metric_name} {metric}"
    return f"{what}, {ratio} times fewer bytes, {record.status}"


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
