"""Controller runtime: passes step reports to the controller state and its settings to lanes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import thread_time

import torch
from torch import Tensor

from gradwire.base import Aggregator
from gradwire.control.base import Controller, ControllerState, Decision, Setting, StepReport
from gradwire.control.timing import Clock, StepTiming, heard_of, told_by
from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.spec import find_layers, format_spec, name_of

UNKNOWN = StepTiming(-1.0, 0.0, 0.0, 0.0, 0.0)
"""Told in the place of a step's lap where nobody knows it."""


class ControllerRuntime:
    """The lanes that a controller steers: those that the plan compresses."""

    def __init__(
        self,
        controller: Controller,
        plan: Plan,
        lanes: Mapping[str, Lane],
        rank: int,
        size: int,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.controller, self.clock = controller, clock
        self.rank, self.size = rank, size
        self._on_change = on_change
        self.last = UNKNOWN
        self._laps: dict[torch.device, Tensor] = {}
        """What `last` is, as numbers for a message."""
        self._written: set[torch.device] = set()
        self._names: list[tuple[Sequence[str], Tensor]] = []
        self._host: Tensor | None = None
        self._known: torch.cuda.Event | None = None
        self.check(plan)
        self.take_over(plan, lanes)

    def take_over(
        self,
        plan: Plan,
        lanes: Mapping[str, Lane],
        old: ControllerState | None = None,
        step: int = 0,
    ) -> None:
        """Steers these lanes from now on, `old` having steered the same parameters until `step`."""
        if old is not None:
            old.log.now = step
        self._plan, self._lanes = plan, lanes
        self.names = [n for n, lane in lanes.items() if _is_steered(lane, plan)]
        self.pilot = self.controller.pilot(plan.compressor, self.names, self.size, old)
        self._orders: dict[str, Setting] = {}
        for name in self.names:
            lanes[name].sample_every = self.pilot.samples_every
        self.redirect()

    def check(self, plan: Plan) -> None:
        """Raises ConfigError unless the controller can steer this method, and all it may order."""
        self.controller.pilot(plan.compressor, [], self.size)
        for compressor in self.controller.settings(plan.compressor):
            try:
                plan.check(compressor)
            except ConfigError as error:
                raise ConfigError(f"{name_of(self.controller)}: {error}") from None

    @property
    def late(self) -> bool:
        """Whether the host would have to wait for the numbers."""
        return self._known is not None

    def listen(self, names: Sequence[str], grads: Sequence[Tensor], scale: float) -> None:
        """Lets the pilot hear of gradients that are about to go out."""
        with self._own_time():
            for name, grad in zip(names, grads, strict=True):
                if name in self._orders:
                    self.pilot.listen(name, grad, scale)
            if grads and self.pilot.asks:
                self._write_lap(grads[0].device)

    def census(self, names: Sequence[str], device: torch.device) -> Piggyback | None:
        """What goes with the messages about these parameters, if anything does."""
        steered = [name for name in names if name in self._orders]
        if not self.pilot.asks or not steered:
            return None

        def numbers() -> Tensor | None:
            with self._own_time():
                told = self.pilot.tell(steered)
                if told is None:
                    return None
                lap = self._laps[device]
                return torch.cat([torch.stack(told), lap]) if told else lap.clone()

        return Piggyback(numbers, self.size)

    def _write_lap(self, device: torch.device) -> None:
        """Once a step and device, and always in the same place, so that steps can be replayed."""
        if device in self._written:
            return
        numbers = told_by(self.last, self.rank, self.size)
        room = self._laps.setdefault(device, torch.zeros(len(numbers), device=device))
        for place, number in enumerate(numbers):
            # Filled where they are: a copy from the host would wait.
            room[place].fill_(number)
        self._written.add(device)

    def collect(self, names: Sequence[str], agreed: Tensor | None) -> None:
        """Takes in what a bucket's census has brought."""
        if agreed is not None:
            self._names.append(([n for n in names if n in self._orders], agreed))

    def close(self) -> None:
        """No more messages in this step; on a GPU the numbers set out for the host."""
        if self._names:
            with self._own_time():
                self._send_home(torch.cat([numbers for _, numbers in self._names]))

    def _send_home(self, agreed: Tensor) -> None:
        self._host = agreed
        if agreed.is_cuda:
            self._host = torch.empty(agreed.shape, pin_memory=True)
            self._host.copy_(agreed, non_blocking=True)
            self._known = torch.cuda.Event()
            self._known.record(torch.cuda.current_stream(agreed.device))

    def settle(self, step: int, *, counts: bool) -> None:
        """The pilot learns of a closed step, and lanes get its orders for the next."""
        if self._known is not None:
            self._known.synchronize()
        with self._own_time():
            heard = self._heard(step)
            self._end_lap(counts)
            lost = self._lost()
            if counts:
                self.pilot.step(heard._replace(lost=lost))
            else:
                self.pilot.skip()
            self.redirect()

    def _end_lap(self, counts: bool) -> None:
        if self._written:
            # It was told with the last lap.
            self.clock.own_s -= self.last.own_s
        lap = self.clock.lap()
        self.last = lap if counts and lap is not None else UNKNOWN
        self._written.clear()

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        """Counts what the controller takes of this thread's time."""
        begun_s = thread_time()
        yield
        self.clock.own_s += thread_time() - begun_s

    def _heard(self, step: int) -> StepReport:
        flat = [] if self._host is None else self._host.tolist()
        numbers: list[tuple[Sequence[str], Sequence[float]]] = []
        last, length = UNKNOWN, len(told_by(UNKNOWN, 0, self.size))
        for names, agreed in self._names:
            told = flat[: agreed.numel()]
            numbers.append((names, told[:-length]))
            last = heard_of(told[-length:], self.size)
            flat = flat[agreed.numel() :]
        self._names, self._host, self._known = [], None, None
        if last.step_s <= 0:
            return StepReport(step, numbers, None)
        return StepReport(step, numbers, last.step_s, last)

    def _lost(self) -> dict[str, Tensor]:
        """What lanes have sampled in this step."""
        found: dict[str, Tensor] = {}
        for name in self.names:
            lane = self._lanes[name]
            if lane.lost is not None:
                found[name], lane.lost = lane.lost, None
        return found

    def redirect(self) -> None:
        """Brings lanes to the pilot's orders, where these have changed."""
        orders = {name: self.pilot.order(name) for name in self.names}
        changed = {n: order for n, order in orders.items() if order != self._orders.get(n)}
        # Where all is said anyway there is nothing to redirect, only something to watch.
        for name, order in () if self._plan.is_dense() else changed.items():
            self._lanes[name].redirect(order.compressor, self._talker(order))
        self._orders.update(changed)
        if changed:
            self._on_change()

    def _talker(self, order: Setting) -> Aggregator:
        way = self._plan.exchange
        return self._plan.wrap(dense_way(way) if order.dense else way, order.compressor)

    def orders(self) -> dict[str, Setting]:
        """What lanes follow now."""
        return dict(self._orders)

    def stats(self) -> dict[str, object]:
        decisions = self.pilot.log.rows()
        spec = format_spec(self.controller)
        return {"spec": spec, **self.pilot.explain(), "decisions": decisions}

    def resize(self) -> None:
        """Goes on with the state of another number of ranks."""
        self.last = UNKNOWN
        self.pilot.resize()

    def save(self) -> dict[str, object]:
        log = [list(decision) for decision in self.pilot.log.decisions]
        spec = format_spec(self.controller)
        return {"spec": spec, "last": list(self.last), "log": log, "pilot": self.pilot.save()}

    def load(self, saved: object) -> None:
        """Goes on with the orders of the run that was saved."""
        spec = format_spec(self.controller)
        match saved:
            case {"spec": found} if found != spec:
                raise ConfigError(f"state: controller is {found!r}, expected {spec!r}")
            case {"spec": _, "last": list(last), "log": list(log), "pilot": dict(pilot)}:
                self._load(last, log, pilot)
            case _:
                raise ConfigError(f"state: controller: {spec} has not saved this")
        self.redirect()

    def _load(
        self, last: list[float], log: list[tuple[int, str, str]], pilot: Mapping[str, object]
    ) -> None:
        try:
            self.last = StepTiming(*last)
            self.pilot.log.decisions = [Decision(*decision) for decision in log]
            self.pilot.load(pilot)
        except (KeyError, TypeError, ValueError) as error:
            # A state of another version has other entries.
            spec = format_spec(self.controller)
            raise ConfigError(f"state: controller: {spec} has not saved this: {error!r}") from error


def _is_steered(lane: Lane, plan: Plan) -> bool:
    """Whether the plan compresses it; where it compresses nothing, what it else would."""
    if plan.is_dense():
        return len(lane.ctx.shape) > 1 and lane.ctx.numel >= plan.min_numel
    return lane.compressor is plan.compressor


def dense_way(exchange: str) -> str:
    """The exchange for a step in which all is said: a mean, unless another aggregate is asked."""
    layers = find_layers(exchange)
    if layers is not None:
        return f"{layers.exchange}:node={layers.node},between={dense_way(layers.between)}"
    return exchange if ":" in exchange else "mean"
