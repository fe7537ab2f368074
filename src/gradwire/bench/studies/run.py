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
from gradwire.bench.predictions.measured_model import MeasuredModel, controller_of, plan_of
from gradwire.bench.predictions.simulate import Links, SimulateBench
from gradwire.bench.records.compare import Target, parse_target
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.simulated.base import SimulatedTrainer, Snapshot, train
from gradwire.bench.simulated.clock import ByteCountRunClock, PredictedRunClock, RunClock
from gradwire.bench.simulated.train import SimulatedRun
from gradwire.bench.simulated.trainer import ExchangeTrainer, exchange_trainer, local_trainer
from gradwire.bench.studies.device_lock import DeviceLock
from gradwire.bench.studies.study import Study
from gradwire.bench.worker.protocol import Job
from gradwire.bench.workloads.base import Workload, parse_workload
from gradwire.comm.cost_model import parse_latency, parse_rate
from gradwire.engine.plan import Plan
from gradwire.errors import GradwireError
from gradwire.perfmodel.exchange_cost import measure_exchange
from gradwire.perfmodel.predict import Prediction


class CommandSettings(NamedTuple):
    """The settings that all runs of a command have in common."""

    data: Path | None
    device: str
    command: str
    commit: str | None


class TimeLimitReached(Exception):
    """A run was stopped before its end, or not started; it leaves no records."""


Outcome: TypeAlias = list[TrainRecord] | TimeLimitReached | str
"""The records of a run, or the reason why there are none."""


@dataclass(frozen=True)
class Run:
    """One training, which gives a record for every rate: the messages are the same at all rates.

    Only a controller may decide differently at each rate.
    """

    study: Study
    case: str
    seed: int
    rates: tuple[str, ...]

    def outcome(
        self,
        setting: CommandSettings,
        measured: MeasuredModel,
        end_s: float,
        device_lock: DeviceLock | None = None,
    ) -> Outcome:
        """Runs until `end_s` of the monotonic clock at most; a failure is returned as a text.

        With a `device_lock` other processes may train at the same time, but not during timing.
        """
        if time.monotonic() > end_s:
            return TimeLimitReached()
        try:
            return self._records(setting, measured, end_s, device_lock)
        except TimeLimitReached as late:
            return late
        except (GradwireError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    def _records(
        self,
        setting: CommandSettings,
        measured: MeasuredModel,
        end_s: float,
        device_lock: DeviceLock | None,
    ) -> list[TrainRecord]:
        study, every = self.study, max(1, self.study.steps // self.study.evaluations)
        workload = parse_workload(study.workload, setting.data, setting.device)
        facts = device_facts(setting.device)
        if setting.commit is not None:
            facts["commit"] = setting.commit
        with ExitStack() as stack:
            trainer, clocks = self._begin(workload, measured, device_lock, stack)
            device_context = nullcontext if device_lock is None else device_lock.shared
            snapshots = list(_until(end_s, train(trainer, study.steps, every, device_context)))
            simulated_run = SimulatedRun(
                self._job(setting, every),
                self.case,
                clocks,
                setting.command,
                facts,
                self._target(workload),
                measured.compute.compute_s * 1e3,
            )
            return simulated_run.records(trainer, snapshots)

    def _job(self, setting: CommandSettings, every: int) -> Job:
        return Job(
            workload=self.study.workload,
            case_order=(self.case,),
            steps=self.study.steps,
            warmup=0,
            evaluate_every=every,
            seed=self.seed,
            data=None if setting.data is None else str(setting.data),
            device=setting.device,
        )

    def _begin(
        self,
        workload: Workload,
        measured: MeasuredModel,
        device_lock: DeviceLock | None,
        stack: ExitStack,
    ) -> tuple[SimulatedTrainer, dict[str, RunClock]]:
        workers, compute_s = self.study.workers, measured.compute.compute_s
        links = {rate: self._links(rate) for rate in self.rates}
        case = parse_case(self.case)
        if isinstance(case, LocalCase):
            local = stack.enter_context(local_trainer(workload, case, workers, self.seed))
            codec = self._codec_s(case, measured, device_lock)
            arguments = compute_s, workers, case.sync_schedule(), *codec, case.settings().kind
            return local, {
                rate: ByteCountRunClock(link, *arguments) for rate, link in links.items()
            }
        trainer = exchange_trainer(workload, self.case, workers, self.seed)
        return trainer, {
            rate: self._predicted_clock(trainer, measured, device_lock, link)
            for rate, link in links.items()
        }

    def _codec_s(
        self, case: LocalCase, measured: MeasuredModel, device_lock: DeviceLock | None
    ) -> tuple[float, float]:
        """Measures encoding and decoding in a sync, as in an exchange of the same method."""
        settings = case.settings()
        senders = settings.senders(self.study.workers)
        plan = plan_of(case.spec, measured.tensors, senders)
        with nullcontext() if device_lock is None else device_lock.exclusive():
            messages = measured.exchange_cost(plan, senders).messages * settings.messages
        encode_s = sum(message.codec_s[0] for message in messages)
        return encode_s, sum(sum(message.codec_s[1:]) for message in messages)

    def _predicted_clock(
        self,
        trainer: ExchangeTrainer,
        measured: MeasuredModel,
        device_lock: DeviceLock | None,
        links: Links,
    ) -> RunClock:
        bench = SimulateBench(trainer.workload, (self.case,), (trainer.workers,), links, None, "")
        return PredictedRunClock(
            trainer.track_times(
                self.case,
                partial(_predicted, bench, measured, trainer.workers, device_lock),
                links.network().link,
            )
        )

    def _links(self, rate: str) -> Links:
        return Links(parse_rate(rate), parse_latency(self.study.latency))

    def _target(self, workload: Workload) -> Target | None:
        metric, better = workload.metric
        if self.study.target is None:
            return None
        return parse_target(self.study.target, metric, better)


def runs_of(study: Study) -> Iterator[Run]:
    """Yields every case with every seed; cases with a controller once per rate."""
    pairs = [(case, seed) for seed in study.seeds for case in study.cases]
    if study.by_case:
        pairs = [(case, seed) for case in study.cases for seed in study.seeds]
    for case, seed in pairs:
        local = isinstance(parse_case(case), LocalCase)
        same_at_all_rates = local or controller_of(case) is None
        for rates in [study.rates] if same_at_all_rates else [(rate,) for rate in study.rates]:
            yield Run(study, case, seed, rates)


def _predicted(
    bench: SimulateBench,
    measured: MeasuredModel,
    workers: int,
    device_lock: DeviceLock | None,
    plan: Plan,
) -> Prediction:
    """Predicts the step; with a lock, the exchange is measured while no other process trains."""
    if device_lock is None:
        return bench.predict_plan(measured, plan, workers)
    if not measured.has_exchange_cost(plan, workers):
        with device_lock.shared():
            # A warm-up, which compiles kernels while other processes go on training.
            measure_exchange(plan, measured.tensors, measured.compute.steps, workers)
    with device_lock.exclusive():
        return bench.predict_plan(measured, plan, workers)


def _until(end_s: float, snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    for snapshot in snapshots:
        if time.monotonic() > end_s:
            raise TimeLimitReached
        yield snapshot
