"""`laconic study`: all runs of a study in one process, until they are done or time is up."""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from laconic.bench import human
from laconic.bench.cases import parse_case
from laconic.bench.device import check_device, device_facts, hurry
from laconic.bench.forecasts import Subject, controller_of, measure_workload
from laconic.bench.job import Job
from laconic.bench.local_cases import CASES, PREFIX
from laconic.bench.local_crew import local_crew
from laconic.bench.lockstep import Crew, crew_of
from laconic.bench.pace import CountedPace, ForecastPace, Pace
from laconic.bench.records import TrainRecord, append, check_writable, read
from laconic.bench.simulate_bench import Links, SimulateBench
from laconic.bench.simulated_run import SimulatedRun
from laconic.bench.studies import Study
from laconic.bench.target import Target, parse_target
from laconic.bench.trainee import Seen, Trainee, train
from laconic.bench.workload import Workload, parse_workload
from laconic.errors import ConfigError, LaconicError
from laconic.network.latency import parse_latency
from laconic.network.rate import parse_rate


class Run(NamedTuple):
    """One training, which gives a record for every rate: what was said is the same at all of them.

    Only a controller may say something else at each.
    """

    case: str
    seed: int
    rates: tuple[str, ...]


class TimeIsUp(Exception):
    """A run was left before its end; nothing is kept of it."""


@dataclass(frozen=True)
class StudyBench:
    """Runs that `json_path` has already are not run again, so that a study can go on later."""

    study: Study
    data: Path | None
    device: str
    json_path: Path
    minutes: float
    command: str
    commit: str | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"study: minutes must be positive, got {self.minutes}")
        if self.study.steps < 1:
            raise ConfigError(f"study: steps must be at least 1, got {self.study.steps}")
        for case in self.study.cases:
            check_case(case)

    def run(self, console: Console) -> bool:
        """Whether all runs are done; each one's records are written when it is over."""
        check_device(self.device)
        check_writable(self.json_path)
        if self.device == "cuda":
            hurry()
        end_s = time.monotonic() + 60 * self.minutes
        known = self._known()
        left = [run for run in self._runs() if not known >= _parts(run)]
        workload = parse_workload(self.study.workload, self.data, self.device)
        subject = measure_workload(workload) if left else None
        failed = 0
        for number, run in enumerate(left):
            assert subject is not None
            try:
                failed += not self._take(run, workload, subject, end_s, console)
            except TimeIsUp:
                _say(console, f"Time is up; {len(left) - number} runs are left.")
                return False
            # Graphs of a run that is over must not be freed while the next one's are recorded.
            gc.collect()
        return not failed

    def _runs(self) -> Iterator[Run]:
        rates = self.study.rates
        for seed in self.study.seeds:
            for case in self.study.cases:
                alike = case.startswith(PREFIX) or controller_of(case) is None
                for some in [rates] if alike else [(rate,) for rate in rates]:
                    yield Run(case, seed, some)

    def _known(self) -> set[tuple[str, int, str | None]]:
        """Those of this study's setting that came to their end, however good that was."""
        mine = self.study.workload, self.study.steps, self.study.workers, self.device
        return {
            (record.spec, record.seed, record.rate)
            for record in read([self.json_path])
            if isinstance(record, TrainRecord)
            and record.status in ("done", "diverged")
            and (record.workload_spec, record.steps, record.workers, record.device) == mine
        }

    def _take(
        self, run: Run, workload: Workload, subject: Subject, end_s: float, console: Console
    ) -> bool:
        """Whether it came to its end; one that fails does not keep others from theirs."""
        start_s = time.monotonic()
        try:
            records = self._train(run, workload, subject, end_s)
        except (LaconicError, RuntimeError) as error:
            _say(console, f"{run.case}, seed {run.seed}: {type(error).__name__}: {error}")
            return False
        for record in records:
            append(self.json_path, record)
        took_s = time.monotonic() - start_s
        _say(console, f"{_words(records[0])}; {took_s:.1f} s")
        return True

    def _train(
        self, run: Run, workload: Workload, subject: Subject, end_s: float
    ) -> list[TrainRecord]:
        study, every = self.study, max(1, self.study.steps // self.study.looks)
        job = Job(
            workload=study.workload,
            turns=(run.case,),
            steps=study.steps,
            warmup=0,
            evaluate_every=every,
            seed=run.seed,
            data=None if self.data is None else str(self.data),
            device=self.device,
        )
        facts = device_facts(self.device) | ({} if self.commit is None else {"commit": self.commit})
        compute_ms = subject.compute.compute_s * 1e3
        with ExitStack() as stack:
            trainee, paces = self._begin(run, workload, subject, stack)
            seen = list(_until(end_s, train(trainee, study.steps, every)))
            about = SimulatedRun(
                job, run.case, paces, self.command, facts, self._target(workload), compute_ms
            )
            return about.records(trainee, seen)

    def _begin(
        self, run: Run, workload: Workload, subject: Subject, stack: ExitStack
    ) -> tuple[Trainee, dict[str, Pace]]:
        workers, compute_s = self.study.workers, subject.compute.compute_s
        links = {rate: self._links(rate) for rate in run.rates}
        if run.case.startswith(PREFIX):
            case = CASES[run.case.removeprefix(PREFIX)]
            local = stack.enter_context(local_crew(workload, case, workers, run.seed))
            return local, {r: CountedPace(compute_s, some, workers) for r, some in links.items()}
        crew = crew_of(workload, run.case, workers, run.seed)
        return crew, {r: self._watched(crew, run.case, subject, some) for r, some in links.items()}

    def _watched(self, crew: Crew, case: str, subject: Subject, links: Links) -> Pace:
        bench = SimulateBench(crew.workload, (case,), (crew.workers,), links, None, self.command)
        predict = partial(bench.predict_plan, subject, workers=crew.workers)
        return ForecastPace(crew.watched(case, predict))

    def _links(self, rate: str) -> Links:
        return Links(parse_rate(rate), parse_latency(self.study.latency))

    def _target(self, workload: Workload) -> Target | None:
        metric, better = workload.metric
        return (
            None if self.study.target is None else parse_target(self.study.target, metric, better)
        )


def check_case(case: str) -> None:
    """Raises unless it is one of `local NAME` or one that a link would take."""
    if not case.startswith(PREFIX):
        parse_case(case)
    elif case.removeprefix(PREFIX) not in CASES:
        name = case.removeprefix(PREFIX)
        raise ConfigError(f"no local case named {name!r}; there are {', '.join(CASES)}")


def _parts(run: Run) -> set[tuple[str, int, str | None]]:
    return {(run.case, run.seed, rate) for rate in run.rates}


def _until(end_s: float, looks: Iterator[Seen]) -> Iterator[Seen]:
    for look in looks:
        if time.monotonic() > end_s:
            raise TimeIsUp
        yield look


def _words(record: TrainRecord) -> str:
    metric = human.digits(record.metric) if record.metric is not None else "none"
    ratio = human.digits(record.ratio) if record.ratio is not None else "no"
    what = f"{record.spec}, seed {record.seed}: {record.metric_name} {metric}"
    return f"{what}, {ratio} times fewer bytes, {record.status}"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
