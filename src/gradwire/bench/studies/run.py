"""One run of a study: trains the workers once and records the time at every link rate."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.machine import device_facts
from gradwire.bench.predictions.measured_model import Subject, controller_of
from gradwire.bench.predictions.simulate import Links, SimulateBench
from gradwire.bench.records.compare import Target, parse_target
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.simulated.base import Seen, Trainee, train
from gradwire.bench.simulated.clock import CountedPace, ForecastPace, Pace
from gradwire.bench.simulated.train import SimulatedRun
from gradwire.bench.simulated.trainer import Crew, crew_of, local_crew
from gradwire.bench.studies.definitions import Study
from gradwire.bench.studies.device_lock import Room
from gradwire.bench.worker.protocol import Job
from gradwire.bench.workloads.base import Workload, parse_workload
from gradwire.comm.cost_model import parse_latency, parse_rate
from gradwire.engine.plan import Plan
from gradwire.errors import GradwireError
from gradwire.perfmodel.exchange_cost import rehearse
from gradwire.perfmodel.predict import Prediction


class Setting(NamedTuple):
    """What all runs of a call have in common."""

    data: Path | None
    device: str
    command: str
    commit: str | None


class TimeIsUp(Exception):
    """A run was left before its end, or not begun; nothing is kept of it."""


Outcome: TypeAlias = list[TrainRecord] | TimeIsUp | str
"""A run's records, or why there are none."""


@dataclass(frozen=True)
class Run:
    """One training, which gives a record for every rate: what was said is the same at all of them.

    Only a controller may say something else at each.
    """

    study: Study
    case: str
    seed: int
    rates: tuple[str, ...]

    def outcome(
        self, setting: Setting, subject: Subject, end_s: float, room: Room | None = None
    ) -> Outcome:
        """What comes of it until `end_s` of the monotonic clock; what fails keeps to itself.

        In a `room` others may train at the same time, but nobody does while something is timed.
        """
        if time.monotonic() > end_s:
            return TimeIsUp()
        try:
            return self._records(setting, subject, end_s, room)
        except TimeIsUp as late:
            return late
        except (GradwireError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    def _records(
        self, setting: Setting, subject: Subject, end_s: float, room: Room | None
    ) -> list[TrainRecord]:
        study, every = self.study, max(1, self.study.steps // self.study.looks)
        workload = parse_workload(study.workload, setting.data, setting.device)
        facts = device_facts(setting.device)
        if setting.commit is not None:
            facts["commit"] = setting.commit
        with ExitStack() as stack:
            trainee, paces = self._begin(workload, subject, room, stack)
            at_work = nullcontext if room is None else room.shared
            seen = list(_until(end_s, train(trainee, study.steps, every, at_work)))
            about = SimulatedRun(
                self._job(setting, every),
                self.case,
                paces,
                setting.command,
                facts,
                self._target(workload),
                subject.compute.compute_s * 1e3,
            )
            return about.records(trainee, seen)

    def _job(self, setting: Setting, every: int) -> Job:
        return Job(
            workload=self.study.workload,
            turns=(self.case,),
            steps=self.study.steps,
            warmup=0,
            evaluate_every=every,
            seed=self.seed,
            data=None if setting.data is None else str(setting.data),
            device=setting.device,
        )

    def _begin(
        self, workload: Workload, subject: Subject, room: Room | None, stack: ExitStack
    ) -> tuple[Trainee, dict[str, Pace]]:
        workers, compute_s = self.study.workers, subject.compute.compute_s
        links = {rate: self._links(rate) for rate in self.rates}
        case = parse_case(self.case)
        if isinstance(case, LocalCase):
            local = stack.enter_context(local_crew(workload, case, workers, self.seed))
            known = compute_s, workers, case.rhythm()
            return local, {r: CountedPace(some, *known) for r, some in links.items()}
        crew = crew_of(workload, self.case, workers, self.seed)
        return crew, {r: self._watched(crew, subject, room, some) for r, some in links.items()}

    def _watched(self, crew: Crew, subject: Subject, room: Room | None, links: Links) -> Pace:
        bench = SimulateBench(crew.workload, (self.case,), (crew.workers,), links, None, "")
        return ForecastPace(
            crew.watched(self.case, partial(_predicted, bench, subject, crew.workers, room))
        )

    def _links(self, rate: str) -> Links:
        return Links(parse_rate(rate), parse_latency(self.study.latency))

    def _target(self, workload: Workload) -> Target | None:
        metric, better = workload.metric
        if self.study.target is None:
            return None
        return parse_target(self.study.target, metric, better)


def runs_of(study: Study) -> Iterator[Run]:
    """Every case with every seed; cases with a controller at every rate."""
    for seed in study.seeds:
        for case in study.cases:
            local = isinstance(parse_case(case), LocalCase)
            alike = local or controller_of(case) is None
            for rates in [study.rates] if alike else [(rate,) for rate in study.rates]:
                yield Run(study, case, seed, rates)


def _predicted(
    bench: SimulateBench, subject: Subject, workers: int, room: Room | None, plan: Plan
) -> Prediction:
    """What a step takes, measured while nobody else is at work."""
    if room is None:
        return bench.predict_plan(subject, plan, workers)
    if not subject.has_rehearsed(plan, workers):
        with room.shared():
            # Kernels are compiled in this one, for which others need not wait.
            rehearse(plan, subject.tensors, subject.compute.steps, workers)
    with room.alone():
        return bench.predict_plan(subject, plan, workers)


def _until(end_s: float, looks: Iterator[Seen]) -> Iterator[Seen]:
    for look in looks:
        if time.monotonic() > end_s:
            raise TimeIsUp
        yield look
