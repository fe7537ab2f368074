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
from gradwire.bench.machine import check_device, hurry
from gradwire.bench.predictions.measured_model import Subject, measure_workload
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import TrainRecord, read
from gradwire.bench.runs.cluster_run import Ending
from gradwire.bench.studies.definitions import Study
from gradwire.bench.studies.device_lock import Room
from gradwire.bench.studies.run import Outcome, Run, Setting, TimeIsUp, runs_of
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class _ProcessRunner:
    """What processes are told; all measure in one room."""

    setting: Setting
    subjects: Mapping[str, Subject]
    end_s: float
    folder: Path

    def take(self, run: Run) -> tuple[Run, Outcome, float]:
        """Lets a process of its own do it, so that no run meets what another has left behind."""
        start_s = time.monotonic()
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        subject = self.subjects[run.study.workload]
        told = theirs, run, self.setting, subject, self.end_s, self.folder
        process = context.Process(target=_run_in_process, args=told)
        process.start()
        theirs.close()
        try:
            outcome: Outcome = ours.recv()
        except EOFError:
            process.join()
            outcome = f"its process ended with {process.exitcode}"
        process.join()
        return run, outcome, time.monotonic() - start_s


def in_processes(
    runs: Sequence[Run],
    setting: Setting,
    subjects: Mapping[str, Subject],
    end_s: float,
    jobs: int,
) -> Iterator[tuple[Run, Outcome, float]]:
    """Every run with its outcome and its seconds, as they end; `jobs` of them at a time."""
    lent = {spec: subject.to("cpu") for spec, subject in subjects.items()}
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        office = _ProcessRunner(setting, lent, end_s, Path(folder))
        for done in as_completed([pool.submit(office.take, run) for run in runs]):
            yield done.result()


def _run_in_process(
    told: Connection, run: Run, setting: Setting, subject: Subject, end_s: float, folder: Path
) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        hurry()
    room = Room(folder, setting.device)
    told.send(run.outcome(setting, subject.to(setting.device), end_s, room))


@dataclass(frozen=True)
class StudyBench:
    """Runs that `json_path` has already are not run again, so that a study can go on later.

    With several `jobs` so many runs are under way at a time, in a process each.
    """

    studies: tuple[Study, ...]
    setting: Setting
    json_path: Path
    minutes: float
    jobs: int = 1

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"study: minutes must be positive, got {self.minutes}")
        if self.jobs < 1:
            raise ConfigError(f"study: jobs must be at least 1, got {self.jobs}")
        for study in self.studies:
            if study.steps < 1:
                raise ConfigError(f"study: steps must be at least 1, got {study.steps}")
            for case in study.cases:
                parse_case(case)

    def run(self, console: Console) -> Ending:
        """Runs all that is left; each one's records are written when it is over."""
        check_device(self.setting.device)
        check_writable(self.json_path)
        if self.setting.device == "cuda":
            hurry()
        end_s = time.monotonic() + 60 * self.minutes
        left = self._left()
        subjects = self._subjects(left)
        late = failed = 0
        for run, outcome, took_s in self._outcomes(left, subjects, end_s):
            if isinstance(outcome, TimeIsUp):
                late += 1
            elif isinstance(outcome, str):
                failed += 1
                _say(console, f"{run.case}, seed {run.seed}: {outcome}")
            else:
                for record in outcome:
                    append(self.json_path, record)
                _say(console, f"{_words(outcome[0])}; {took_s:.1f} s")
        if late:
            _say(console, f"Time is up; {late} runs are left.")
        return "failed" if failed else "interrupted" if late else "done"

    def _left(self) -> list[Run]:
        """All that has to be done, each once."""
        known = self._known()
        left = {_key(run): run for study in self.studies for run in runs_of(study)}
        return [run for run in left.values() if not known >= _parts(run)]

    def _known(self) -> set[tuple[object, ...]]:
        """Those that came to their end, however good that was."""
        return {
            (r.workload_spec, r.steps, r.workers, r.spec, r.seed, r.rate)
            for r in read([self.json_path])
            if isinstance(r, TrainRecord)
            and r.status in ("done", "diverged")
            and r.device == self.setting.device
        }

    def _subjects(self, runs: list[Run]) -> dict[str, Subject]:
        """Each workload's model, measured before anybody trains."""
        specs = dict.fromkeys(run.study.workload for run in runs)
        data, device = self.setting.data, self.setting.device
        return {spec: measure_workload(parse_workload(spec, data, device)) for spec in specs}

    def _outcomes(
        self, runs: list[Run], subjects: dict[str, Subject], end_s: float
    ) -> Iterator[tuple[Run, Outcome, float]]:
        """Every run with its records, or why there are none, and the seconds that it took."""
        if self.jobs > 1:
            yield from in_processes(runs, self.setting, subjects, end_s, self.jobs)
            return
        for run in runs:
            start_s = time.monotonic()
            outcome = run.outcome(self.setting, subjects[run.study.workload], end_s)
            yield run, outcome, time.monotonic() - start_s
            # Graphs of a run that is over must not be freed while the next one's are recorded.
            gc.collect()


def _key(run: Run) -> tuple[object, ...]:
    study = run.study
    return study.workload, study.steps, study.workers, run.case, run.seed, run.rates


def _parts(run: Run) -> set[tuple[object, ...]]:
    """What `_known` has of a run that is over."""
    *who, _ = _key(run)
    return {(*who, rate) for rate in run.rates}


def _words(record: TrainRecord) -> str:
    metric = human.digits(record.metric) if record.metric is not None else "none"
    ratio = human.digits(record.ratio) if record.ratio is not None else "no"
    what = f"{record.spec}, seed {record.seed}: {record.metric_name} {metric}"
    return f"{what}, {ratio} times fewer bytes, {record.status}"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
