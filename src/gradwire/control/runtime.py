"""The controller runtime: a `StepObserver` that lets a controller set the compression of lanes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import thread_time

import torch
from torch import Tensor

from gradwire.control.base import Controller, ControllerState, Decision, Setting, StepReport
from gradwire.control.timing import Clock, StepTiming, decode_timing, encode_timing
from gradwire.engine.engine import Engine
from gradwire.engine.observer import StepObserver
from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.identity import check_saved_identity, identity_of
from gradwire.spec import format_spec, name_of

UNKNOWN = StepTiming(-1.0, 0.0, 0.0, 0.0, 0.0)
"""Sent in place of a step's timing where it is not known."""


class ControllerRuntime(StepObserver):
    """Passes averaged statistics to a controller's state, and its settings to the lanes."""

    def __init__(self, controller: Controller, engine: Engine, clock: Clock) -> None:
        """Controls the compressed lanes of the engine; set it as the engine's observer."""
        self.controller, self.clock = controller, clock
        self._engine = engine
        self._world_size = engine.world_size
        self._last_timing = UNKNOWN
        self._timings: dict[torch.device, Tensor] = {}
        """The last timing as numbers for a message, per device."""
        self._written: set[torch.device] = set()
        self._received: list[tuple[Sequence[str], Tensor]] = []
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self.check_plan(engine.plan)
        self._control(engine.plan, engine.lanes, None)

    def _control(self, plan: Plan, lanes: Mapping[str, Lane], old: ControllerState | None) -> None:
        self._plan, self._lanes = plan, lanes
        self.names = [name for name, lane in lanes.items() if _is_controlled(lane, plan)]
        self.state = self.controller.create_state(
            plan.compressor, self.names, self._world_size, old
        )
        self._settings: dict[str, Setting] = {}
        for name in self.names:
            lanes[name].sample_every = self.state.sample_interval
        self._apply_settings()

    def check_plan(self, plan: Plan) -> None:
        """Raises ConfigError if the controller cannot set this method, or may choose illegally."""
        self.controller.create_state(plan.compressor, [], self._world_size)
        for compressor in self.controller.settings(plan.compressor):
            try:
                plan.check(compressor)
            except ConfigError as error:
                raise ConfigError(f"{name_of(self.controller)}: {error}") from None

    def plan_changed(self, plan: Plan, lanes: Mapping[str, Lane], step: int) -> None:
        self.state.log.start_step = step
        self._control(plan, lanes, self.state)

    @property
    def pending(self) -> bool:
        return self._copied is not None

    @property
    def is_measuring(self) -> bool:
        return self.state.needs_measurement

    @property
    def is_idle(self) -> bool:
        return False

    def bucket_started(
        self, names: Sequence[str], grads: Sequence[Tensor], loss_scale: float
    ) -> None:
        with self._overhead():
            for name, grad in zip(names, grads, strict=True):
                if name in self._settings:
                    self.state.observe_gradient(name, grad, loss_scale)
            if grads and self.state.wants_statistics:
                self._write_timing(grads[0].device)

    def piggyback(self, names: Sequence[str], device: torch.device) -> Piggyback | None:
        controlled = [name for name in names if name in self._settings]
        if not self.state.wants_statistics or not controlled:
            return None

        def numbers() -> Tensor | None:
            with self._overhead():
                own = self.state.local_statistics(controlled)
                if own is None:
                    return None
                timing = self._timings[device]
                return torch.cat([torch.stack(own), timing]) if own else timing.clone()

        return Piggyback(numbers, self._world_size)

    def _write_timing(self, device: torch.device) -> None:
        """Writes the last timing once per step, to a fixed address, since steps are replayed."""
        if device in self._written:
            return
        numbers = encode_timing(self._last_timing, self._engine.rank, self._world_size)
        buffer = self._timings.setdefault(device, torch.zeros(len(numbers), device=device))
        for place, number in enumerate(numbers):
            # Filled in place: a copy from the host would wait.
            buffer[place].fill_(number)
        self._written.add(device)

    def bucket_ended(self, names: Sequence[str], statistics: Tensor | None) -> None:
        if statistics is not None:
            self._received.append(([n for n in names if n in self._settings], statistics))

    def step_ended(self) -> None:
        if not self._received:
            return
        with self._overhead():
            statistics = torch.cat([numbers for _, numbers in self._received])
            self._on_host = statistics
            if statistics.is_cuda:
                self._on_host = torch.empty(statistics.shape, pin_memory=True)
                self._on_host.copy_(statistics, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(statistics.device))

    def step_committed(self, step: int, *, counts: bool) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        with self._overhead():
            report = self._report(step)
            self._end_timing(counts)
            errors = self._sampled_errors()
            if counts:
                self.state.end_step(report._replace(local_errors=errors))
            else:
                self.state.skip_step()
            self._apply_settings()

    def _end_timing(self, counts: bool) -> None:
        if self._written:
            # This overhead was sent with the last timing.
            self.clock.overhead_s -= self._last_timing.overhead_s
        timing = self.clock.step_timing()
        self._last_timing = timing if counts and timing is not None else UNKNOWN
        self._written.clear()

    @contextmanager
    def _overhead(self) -> Iterator[None]:
        """Adds the block's CPU time to the controller's overhead."""
        start_s = thread_time()
        yield
        self.clock.overhead_s += thread_time() - start_s

    def _report(self, step: int) -> StepReport:
        flat = [] if self._on_host is None else self._on_host.tolist()
        numbers: list[tuple[Sequence[str], Sequence[float]]] = []
        last, length = UNKNOWN, len(encode_timing(UNKNOWN, 0, self._world_size))
        for names, statistics in self._received:
            own = flat[: statistics.numel()]
            numbers.append((names, own[:-length]))
            last = decode_timing(own[-length:], self._world_size)
            flat = flat[statistics.numel() :]
        self._received, self._on_host, self._copied = [], None, None
        if last.step_s <= 0:
            return StepReport(step, numbers, None)
        return StepReport(step, numbers, last.step_s, last)

    def _sampled_errors(self) -> dict[str, Tensor]:
        """Takes the compression errors that lanes have sampled in this step."""
        found: dict[str, Tensor] = {}
        for name in self.names:
            lane = self._lanes[name]
            if lane.sampled_error is not None:
                found[name], lane.sampled_error = lane.sampled_error, None
        return found

    def _apply_settings(self) -> None:
        """Reconfigures the lanes whose setting has changed."""
        settings = {name: self.state.setting_for(name) for name in self.names}
        changed = {
            n: setting for n, setting in settings.items() if setting != self._settings.get(n)
        }
        # A dense plan has nothing to set, only gradients to observe.
        for name, setting in () if self._plan.default.is_dense else changed.items():
            exchange = self._plan.exchange.dense() if setting.dense else self._plan.exchange
            aggregator = self._plan.wrap(exchange, setting.compressor)
            self._lanes[name].reconfigure(setting.compressor, aggregator)
        self._settings.update(changed)
        if changed:
            self._engine.drop_cuda_graphs()

    def settings(self) -> dict[str, Setting]:
        """Returns the current setting of each controlled lane."""
        return dict(self._settings)

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        self.state.learning_rate_changed(step, before, after)
        self._apply_settings()

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        self.state.epoch_ended(step, learning_rate)
        self._apply_settings()

    def world_size_changed(self) -> None:
        self._last_timing = UNKNOWN
        self.state.world_size_changed()

    def stats(self) -> dict[str, object]:
        decisions = self.state.log.rows()
        spec = format_spec(self.controller)
        return {"spec": spec, **self.state.explain(), "decisions": decisions}

    def state_dict(self) -> dict[str, object]:
        return {
            "identity": identity_of(self.controller),
            "timing": list(self._last_timing),
            "log": [list(decision) for decision in self.state.log.decisions],
            "state": self.state.state_dict(),
        }

    def adopt_plan(self, state: object) -> None:
        """Does nothing: a controller changes the settings of the plan that it was given."""

    def load_state_dict(self, state: object) -> None:
        """Continues with the settings of the saved run; raises ConfigError if they do not fit."""
        spec = format_spec(self.controller)
        if isinstance(state, Mapping):
            check_saved_identity("controller", state.get("identity"), identity_of(self.controller))
        match state:
            case {"timing": list(timing), "log": list(log), "state": dict(own)}:
                self._load(timing, log, own)
            case _:
                raise ConfigError(f"state: controller: this is not a state of {spec}")
        self._apply_settings()

    def _load(
        self, timing: list[float], log: list[tuple[int, str, str]], own: Mapping[str, object]
    ) -> None:
        try:
            self._last_timing = StepTiming(*timing)
            self.state.log.decisions = [Decision(*decision) for decision in log]
            self.state.load_state_dict(own)
        except (KeyError, TypeError, ValueError) as error:
            # A state of another version has other entries.
            spec = format_spec(self.controller)
            raise ConfigError(
                f"state: controller: this is not a state of {spec}: {error!r}"
            ) from error


def _is_controlled(lane: Lane, plan: Plan) -> bool:
    """Returns whether the plan compresses the lane, or would if it were not dense."""
    if plan.method_of(lane.name) is not plan.default:
        # Parameters with a policy of their own keep its setting.
        return False
    if plan.default.is_dense:
        return len(lane.ctx.shape) > 1 and lane.ctx.numel >= plan.min_numel
    return lane.compressor is plan.compressor
