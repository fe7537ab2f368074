"""The predicted clock of a simulated run.

Step times come from forecasts, one per setting that a controller chooses, or from counted bytes for
local methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import NamedTuple, TypeAlias

from gradwire.bench.cases.local import Rhythm
from gradwire.bench.predictions.simulate import Links
from gradwire.bench.simulated.base import Seen
from gradwire.comm.cost_model import way
from gradwire.comm.meter import Meter
from gradwire.control.base import Controller, Setting
from gradwire.control.runtime import dense_way
from gradwire.control.timing import Clock, StepTiming
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.perfmodel.overlap import Forecast
from gradwire.simulate import Simulation

SHAPE = (1000, 1000)
"""Orders that say as much of this tensor take as long."""

Predict: TypeAlias = Callable[[Plan], Forecast]


@dataclass
class Forecasts:
    """Made when an order is first given, and kept."""

    plan: Plan
    predict: Predict
    _known: dict[tuple[bool, int], Forecast] = field(default_factory=dict)

    def of(self, order: Setting) -> Forecast:
        """A step in which all lanes follow this order."""
        key = order.dense, order.compressor.nbytes(SHAPE)
        if key not in self._known:
            way = dense_way(self.plan.exchange) if order.dense else self.plan.exchange
            self._known[key] = self.predict(
                replace(self.plan, compressor=order.compressor, exchange=way)
            )
        return self._known[key]


@dataclass
class ForecastClock(Clock):
    """Laps as forecast: where lanes follow several orders, each counts by what it is about."""

    forecasts: Forecasts
    lanes: Engine
    meter: Meter
    seen: list[Forecast] = field(default_factory=list)
    """Of every step so far."""
    _bytes: int = 0

    def lap(self) -> StepTiming | None:
        sent, self._bytes = self.meter.sent_bytes - self._bytes, self.meter.sent_bytes
        assert self.lanes.helm is not None
        orders = self.lanes.helm.orders()
        parts = [(self.lanes.tensors[n].numel(), self.forecasts.of(o)) for n, o in orders.items()]
        now = _mean(parts) if parts else self.forecasts.predict(self.forecasts.plan)
        self.seen.append(now)
        waited_s = max(now.step_s - now.compute_s, 0.0)
        return StepTiming(now.step_s, now.encode_s + now.decode_s, now.wire_s, sent, waited_s)


@dataclass(frozen=True)
class Watch:
    """How long a run's steps have taken: all alike, or as their clock saw them."""

    alike: Forecast
    clock: ForecastClock | None

    def steps_ms(self, steps: int) -> list[float]:
        if self.clock is None:
            return [self.alike.step_s * 1e3] * steps
        # A step that did not count took its time, too.
        return [seen.step_s * 1e3 for seen in self.clock.seen[:steps]]

    def passed_s(self, steps: int) -> float:
        if self.clock is None:
            return steps * self.alike.step_s
        return sum(self.steps_ms(steps)) / 1e3

    def usual(self) -> Forecast:
        """The mean step."""
        if self.clock is None:
            return self.alike
        return _mean([(1, seen) for seen in self.clock.seen])


def watch_over(
    simulation: Simulation, controller: Controller | None, plan: Plan, predict: Predict
) -> Watch:
    """Lets the controller steer, if there is one; what a step takes is forecast either way."""
    alike = predict(plan)
    if controller is None:
        return Watch(alike, None)
    forecasts = Forecasts(plan, predict)
    pairs = zip(simulation.workers, simulation.network.meters, strict=True)
    clocks = [ForecastClock(forecasts, worker, meter) for worker, meter in pairs]
    for worker, clock in zip(simulation.workers, clocks, strict=True):
        worker.steer(controller, clock)
    return Watch(alike, clocks[0])


def _mean(parts: Sequence[tuple[int, Forecast]]) -> Forecast:
    """With weights."""
    total = sum(weight for weight, _ in parts)
    columns = zip(*([weight * number for number in seen] for weight, seen in parts), strict=True)
    return Forecast(*(fsum(column) / total for column in columns))


class Split(NamedTuple):
    """What a step's exchange takes, on average; None where nobody has forecast it."""

    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None


class Pace(ABC):
    """The clock of one run on one network."""

    @abstractmethod
    def time_s(self, seen: Seen) -> float:
        """How late it is after what was seen."""

    @abstractmethod
    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        """What steps have taken at the end."""

    @abstractmethod
    def split(self) -> Split: ...


@dataclass(frozen=True)
class ForecastPace(Pace):
    """Of a method whose every step can be forecast."""

    watch: Watch

    def time_s(self, seen: Seen) -> float:
        return self.watch.passed_s(seen.step)

    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        return tuple(self.watch.steps_ms(last.step))

    def split(self) -> Split:
        usual = self.watch.usual()
        return Split(usual.encode_s * 1e3, usual.wire_s * 1e3, usual.decode_s * 1e3)


@dataclass(frozen=True)
class CountedPace(Pace):
    """Of a method that says now more, now less: all computation, then all bytes of a link.

    What encoding and decoding take is left out, and every call waits like a ring's mean. What is
    heard later than told travels meanwhile, one telling after the other, and only what is left of
    its way then is waited for.
    """

    links: Links
    compute_s: float
    workers: int
    rhythm: Rhythm

    def time_s(self, seen: Seen) -> float:
        waits_s = seen.calls * way("mean", 0, self.workers).hops * self.links.latency_s
        wire_s = 8 * seen.sent_bytes / self.links.rate_bits + waits_s
        gap, delay = self.rhythm
        meanwhile_s = seen.step // gap * min(gap, delay) * self.compute_s
        return seen.step * self.compute_s + max(0.0, wire_s - meanwhile_s)

    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        return (self.time_s(last) / last.step * 1e3,)

    def split(self) -> Split:
        return Split()
