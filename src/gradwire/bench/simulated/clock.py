"""The predicted clock of a simulated run.

Step times come from predictions, one per setting that a controller chooses, or from counted bytes
for local methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import NamedTuple, TypeAlias

from gradwire.auto.assembly import automatic
from gradwire.auto.auto import Auto
from gradwire.auto.calibration import device_timer
from gradwire.bench.cases.local_settings import SyncSchedule
from gradwire.bench.predictions.simulate import Links
from gradwire.bench.simulated.base import Snapshot
from gradwire.comm.cost_model import Kind, LinkModel, transfer
from gradwire.comm.meter import Meter
from gradwire.control.base import Controller, Setting
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.timing import Clock, StepTiming
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.perfmodel.overlap import StepTimes
from gradwire.simulation import Simulation

SHAPE = (1000, 1000)
"""Settings that send equally many bytes of this tensor have the same predicted step."""

Predict: TypeAlias = Callable[[Plan], StepTimes]


@dataclass
class PredictionCache:
    """Predictions by setting, made when a setting is first used."""

    plan: Plan
    predict: Predict
    _times: dict[tuple[bool, int], StepTimes] = field(default_factory=dict)

    def of(self, setting: Setting) -> StepTimes:
        """Returns the times of a step in which all lanes have this setting."""
        key = setting.dense, setting.compressor.nbytes(SHAPE)
        if key not in self._times:
            exchange = self.plan.exchange.dense() if setting.dense else self.plan.exchange
            self._times[key] = self.predict(
                replace(self.plan, compressor=setting.compressor, exchange=exchange)
            )
        return self._times[key]


class StepClock(Clock):
    """A clock that keeps the predicted times of all steps."""

    steps: list[StepTimes]


@dataclass
class PredictedStepClock(StepClock):
    """Predicted step timings; lanes with different settings count by their numbers of elements."""

    predictions: PredictionCache
    engine: Engine
    meter: Meter
    steps: list[StepTimes] = field(default_factory=list)
    """Times of every step so far."""
    _bytes: int = 0

    def step_timing(self) -> StepTiming | None:
        sent, self._bytes = self.meter.sent_bytes - self._bytes, self.meter.sent_bytes
        assert isinstance(self.engine.observer, ControllerRuntime)
        settings = self.engine.observer.settings()
        parts = [
            (self.engine.lanes[n].ctx.numel, self.predictions.of(o)) for n, o in settings.items()
        ]
        step_times = _mean(parts) if parts else self.predictions.predict(self.predictions.plan)
        self.steps.append(step_times)
        return _timing(step_times, sent)


@dataclass
class PredictedPlanClock(StepClock):
    """Predicted step timings of a run whose plan changes, one prediction per plan."""

    predict: Predict
    engine: Engine
    meter: Meter
    steps: list[StepTimes] = field(default_factory=list)
    """Times of every step so far."""
    _times: dict[Plan, StepTimes] = field(default_factory=dict)
    _bytes: int = 0

    def step_timing(self) -> StepTiming | None:
        sent, self._bytes = self.meter.sent_bytes - self._bytes, self.meter.sent_bytes
        plan = self.engine.plan
        if plan not in self._times:
            self._times[plan] = self.predict(plan)
        self.steps.append(self._times[plan])
        return _timing(self._times[plan], sent)


def _timing(times: StepTimes, sent_bytes: float) -> StepTiming:
    waited_s = max(times.step_s - times.compute_s, 0.0)
    codec_s = times.encode_s + times.decode_s
    return StepTiming(times.step_s, codec_s, times.wire_s, sent_bytes, waited_s)


@dataclass(frozen=True)
class RunTimes:
    """Step times of a run: constant, or as its clock predicted them."""

    constant: StepTimes
    clock: StepClock | None

    def steps_ms(self, steps: int) -> list[float]:
        if self.clock is None:
            return [self.constant.step_s * 1e3] * steps
        # Includes skipped steps, which took their time, too.
        return [step.step_s * 1e3 for step in self.clock.steps[:steps]]

    def elapsed_s(self, steps: int) -> float:
        if self.clock is None:
            return steps * self.constant.step_s
        return sum(self.steps_ms(steps)) / 1e3

    def mean_step(self) -> StepTimes:
        """Returns the mean times of a step."""
        if self.clock is None:
            return self.constant
        return _mean([(1, step) for step in self.clock.steps])


def track_times(
    simulation: Simulation, controller: Controller | None, plan: Plan, predict: Predict
) -> RunTimes:
    """Attaches the controller, if there is one, and returns the predicted times of the run."""
    constant = predict(plan)
    if controller is None:
        return RunTimes(constant, None)
    predictions = PredictionCache(plan, predict)
    pairs = zip(simulation.workers, simulation.network.meters, strict=True)
    clocks = [PredictedStepClock(predictions, worker, meter) for worker, meter in pairs]
    for worker, clock in zip(simulation.workers, clocks, strict=True):
        worker.observer = ControllerRuntime(controller, worker, clock)
    return RunTimes(constant, clocks[0])


def track_automatic(
    simulation: Simulation,
    config: Auto,
    plan: Plan,
    predict: Predict,
    link: LinkModel,
    adaptive: bool,
) -> RunTimes:
    """Attaches the automatic mode, and returns the predicted times of the run."""
    pairs = zip(simulation.workers, simulation.network.meters, strict=True)
    clocks = [PredictedPlanClock(predict, worker, meter) for worker, meter in pairs]
    device = next(iter(simulation.workers[0].tensors.values())).device
    for worker, clock in zip(simulation.workers, clocks, strict=True):
        worker.observer = automatic(
            config, worker, clock, device_timer(device), link, adaptive, overlaps=True
        )
    return RunTimes(predict(plan), clocks[0])


def _mean(parts: Sequence[tuple[int, StepTimes]]) -> StepTimes:
    """Returns the weighted mean."""
    total = sum(weight for weight, _ in parts)
    columns = zip(*([weight * number for number in times] for weight, times in parts), strict=True)
    return StepTimes(*(fsum(column) / total for column in columns))


class Split(NamedTuple):
    """Mean times of a step's exchange; None if they were not predicted."""

    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None


class RunClock(ABC):
    """The clock of one run on one network."""

    @abstractmethod
    def time_s(self, snapshot: Snapshot) -> float:
        """Returns the time of a snapshot since the start of the run."""

    @abstractmethod
    def steps_ms(self, last: Snapshot) -> tuple[float, ...]:
        """Returns the step times up to the last snapshot."""

    @abstractmethod
    def split(self) -> Split: ...


@dataclass(frozen=True)
class PredictedRunClock(RunClock):
    """The clock of a method whose steps can all be predicted."""

    times: RunTimes

    def time_s(self, snapshot: Snapshot) -> float:
        return self.times.elapsed_s(snapshot.step)

    def steps_ms(self, last: Snapshot) -> tuple[float, ...]:
        return tuple(self.times.steps_ms(last.step))

    def split(self) -> Split:
        mean_step = self.times.mean_step()
        return Split(mean_step.encode_s * 1e3, mean_step.wire_s * 1e3, mean_step.decode_s * 1e3)


@dataclass(frozen=True)
class ByteCountRunClock(RunClock):
    """The clock of a local method: the time of all computation plus that of all bytes on a link.

    Every sync also encodes and decodes the whole model, and every call has the latency of one
    collective of its kind. Of CSER only the messages of updates are timed. A delayed sync overlaps
    with the steps of its delay, one sync after the other, and only the rest of its exchange is
    waited for.
    """

    links: Links
    compute_s: float
    workers: int
    sync_schedule: SyncSchedule
    encode_s: float = 0.0
    """Time to encode in one sync; `decode_s` is that to decode."""
    decode_s: float = 0.0
    kind: Kind = "mean"

    def time_s(self, snapshot: Snapshot) -> float:
        hops_s = snapshot.calls * transfer(self.kind, 0, self.workers).hops * self.links.latency_s
        wire_s = 8 * snapshot.sent_bytes / self.links.rate_bits + hops_s
        interval, delay = self.sync_schedule
        syncs = snapshot.step // interval
        exchange_s = wire_s + syncs * (self.encode_s + self.decode_s)
        overlapped_s = syncs * min(interval, delay) * self.compute_s
        return snapshot.step * self.compute_s + max(0.0, exchange_s - overlapped_s)

    def steps_ms(self, last: Snapshot) -> tuple[float, ...]:
        return (self.time_s(last) / last.step * 1e3,)

    def split(self) -> Split:
        interval = self.sync_schedule.interval
        return Split(self.encode_s * 1e3 / interval, None, self.decode_s * 1e3 / interval)
