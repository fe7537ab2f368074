"""What simulated steps take while a controller changes settings: a forecast for every order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import TypeAlias

from laconic.comm.meter import Meter
from laconic.control.base import Controller, Order
from laconic.control.clock import Clock, Lap
from laconic.control.helm import dense_way
from laconic.forecast.timeline import Forecast
from laconic.lanes import Lanes
from laconic.plan import Plan
from laconic.simulate import Simulation

SHAPE = (1000, 1000)
"""Orders that say as much of this tensor take as long."""

Predict: TypeAlias = Callable[[Plan], Forecast]


@dataclass
class Forecasts:
    """Made when an order is first given, and kept."""

    plan: Plan
    predict: Predict
    _known: dict[tuple[bool, int], Forecast] = field(default_factory=dict)

    def of(self, order: Order) -> Forecast:
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
    lanes: Lanes
    meter: Meter
    seen: list[Forecast] = field(default_factory=list)
    """Of every step so far."""
    _bytes: int = 0

    def lap(self) -> Lap | None:
        sent, self._bytes = self.meter.sent_bytes - self._bytes, self.meter.sent_bytes
        assert self.lanes.helm is not None
        orders = self.lanes.helm.orders()
        parts = [(self.lanes.tensors[n].numel(), self.forecasts.of(o)) for n, o in orders.items()]
        now = _mean(parts) if parts else self.forecasts.predict(self.forecasts.plan)
        self.seen.append(now)
        waited_s = max(now.step_s - now.compute_s, 0.0)
        return Lap(now.step_s, now.encode_s + now.decode_s, now.wire_s, sent, waited_s)


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
