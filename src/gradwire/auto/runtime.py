"""The runtime of the automatic mode: a `StepObserver` that switches the engine's plan.

Timings, calibrations and errors of a step travel with the messages of the next one, as their mean
over ranks, so the search sees the same numbers on all ranks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.auto.calibration import Calibration, GradientSample, calibrate
from gradwire.auto.candidates import Candidate, Choice
from gradwire.auto.plans import choice_of
from gradwire.auto.rows import typical
from gradwire.auto.search import CALIBRATED_PER_STEP, Search, StepFacts
from gradwire.control.base import Decision
from gradwire.control.timing import Clock, StepTiming, decode_timing, encode_timing
from gradwire.engine.engine import Engine
from gradwire.engine.observer import StepObserver
from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import DENSE, Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.identity import check_saved_identity, identity_of
from gradwire.spec import ExchangeConfig, format_spec

log = logging.getLogger("gradwire")

UNKNOWN = StepTiming(-1.0, 0.0, 0.0, 0.0, 0.0)
"""Sent in place of a timing where none is known."""
SAMPLE_EVERY = 25
"""One step in this many measures the error, so that a risk that has grown is soon known."""


class AutoRuntime(StepObserver):
    """Measures what the search asks for, and switches the engine to the plan that it chooses."""

    def __init__(
        self, search: Search, engine: Engine, clock: Clock, timer: Callable[[], float]
    ) -> None:
        """`timer` times the kernels of calibrations; set the runtime as the engine's observer."""
        self.search, self._engine, self._clock, self._timer = search, engine, clock, timer
        self._window: list[StepTiming] = []
        self._timed: int | None = None
        """The candidate of the timings in the window, and of the errors."""
        self._excluded = True
        """True if the timing of the step under way is not that of a usual step."""
        self._is_flushing = self._is_switching = False
        self._sample: GradientSample | None = None
        self._groups = search.table.plans.groups
        self._calibrations: dict[int, list[Calibration]] = {}
        self._errors = self._no_errors()
        self._choice: Choice = search.table.options[search.current].choice
        """The choice whose plan the engine has: while residuals are sent, the last."""
        self._numbers: dict[tuple[torch.device, bool], Tensor] = {}
        """What is sent from each device, while candidates are calibrated and otherwise."""
        self._written: set[torch.device] = set()
        self._buckets = 0
        self._received: Tensor | None = None
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._logged = 0
        self._switch(search.table.options[search.current])
        self._sample = self._new_sample()
        self._log_decisions()

    @property
    def pending(self) -> bool:
        return self._copied is not None

    @property
    def is_measuring(self) -> bool:
        return self.search.phase == "calibrate"

    @property
    def is_idle(self) -> bool:
        return self.search.is_quiet and not self._is_flushing

    def check_plan(self, plan: Plan) -> None:
        if not self._is_switching:
            raise ConfigError(
                "switch: auto chooses the method; detach, and attach with the method instead"
            )

    def plan_changed(self, plan: Plan, lanes: Mapping[str, Lane], step: int) -> None:
        """Does nothing: the switch was its own."""

    def bucket_started(
        self, names: Sequence[str], grads: Sequence[Tensor], loss_scale: float
    ) -> None:
        self._buckets += 1
        if self._sample is not None:
            for name, grad in zip(names, grads, strict=True):
                self._sample.take(name, grad, loss_scale)
        if grads and not self.is_idle:
            self._write(grads[0].device)

    def _write(self, device: torch.device) -> None:
        """Writes this rank's numbers once per step; to a fixed address, for CUDA graphs."""
        if device in self._written:
            return
        rank, size = self._engine.rank, self._engine.world_size
        timings = encode_timing(_typical(self._window), rank, size)
        errors = [number for pair in self._errors for number in pair]
        found = [number for own in self._calibrations.values() for part in own for number in part]
        length = CALIBRATED_PER_STEP * len(self._groups) * len(Calibration._fields)
        numbers = [*timings, *errors]
        if self.is_measuring:
            numbers += [*found, *[0.0] * (length - len(found))]
        key = device, self.is_measuring
        buffer = self._numbers.setdefault(key, torch.zeros(len(numbers), device=device))
        buffer.copy_(torch.tensor(numbers))
        self._written.add(device)

    def piggyback(self, names: Sequence[str], device: torch.device) -> Piggyback | None:
        if self.is_idle or not names:
            return None
        buffer = self._numbers[device, self.is_measuring]
        return Piggyback(buffer.clone, self._engine.world_size)

    def bucket_ended(self, names: Sequence[str], statistics: Tensor | None) -> None:
        if statistics is not None:
            self._received = statistics

    def step_ended(self) -> None:
        received = self._received
        if received is None:
            return
        self._on_host = received
        if received.is_cuda:
            self._on_host = torch.empty(received.shape, pin_memory=True)
            self._on_host.copy_(received, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(received.device))

    def step_committed(self, step: int, *, counts: bool) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        facts = self._facts(step)
        self._add_timing(counts)
        self._written.clear()
        if self._sample is not None:
            self._sample.end_step(counts=counts)
        if not counts:
            self._buckets = 0
            return
        if self.search.phase in ("calibrate", "time"):
            self.search.table.buckets = max(1, self._buckets or self.search.table.buckets)
        self._buckets = 0
        self._errors = self._sampled_errors()
        self.search.end_step(facts)
        self._calibrate_next()
        self._apply()
        self._log_decisions()

    def _facts(self, step: int) -> StepFacts:
        """Returns what all ranks know; what was sent with this step is not sent again."""
        numbers = [] if self._on_host is None else self._on_host.tolist()
        self._received = self._on_host = self._copied = None
        took_current = not self._is_flushing
        if not numbers:
            return StepFacts(step, None, None, {}, None, took_current)
        size = self._engine.world_size
        rest = iter(numbers)
        count = len(encode_timing(UNKNOWN, 0, size))
        timing = decode_timing([next(rest) for _ in range(count)], size)
        errors = [(next(rest), next(rest)) for _ in self._groups]
        calibrations = {
            index: [Calibration(*(next(rest) for _ in Calibration._fields)) for _ in self._groups]
            for index in self._calibrations
        }
        timed = self._timed
        self._window, self._timed, self._calibrations = [], None, {}
        known = timing if timing.step_s > 0 else None
        sampled = errors if any(total > 0 for _, total in errors) else None
        return StepFacts(step, known, timed, calibrations, sampled, took_current)

    def _add_timing(self, counts: bool) -> None:
        """Keeps the timing of the step that has ended, unless it is no usual one."""
        timing = self._clock.step_timing()
        excluded, self._excluded = self._excluded, False
        # Steps of uncompressed gradients that send statistics are slower than the others.
        reports = self.search.table.options[self.search.current].is_uncompressed
        reports = reports and not self.is_idle and not self.search.table.replays
        measuring = self.search.phase == "calibrate"
        if excluded or reports or measuring or not counts or timing is None:
            return
        if self._timed != self.search.current or self.search.phase == "settled":
            self._window = []
        self._window.append(timing)
        self._timed = self.search.current

    def _sampled_errors(self) -> list[tuple[float, float]]:
        """Takes the errors that lanes have sampled in this step, summed over each group."""
        found: list[list[Tensor]] = []
        for lanes in self._lanes_of_groups():
            found.append([e for lane in lanes if (e := lane.sampled_error) is not None])
            for lane in lanes:
                lane.sampled_error = None
        if not any(found) or self._is_flushing:
            return self._no_errors()
        device = next(error.device for errors in found for error in errors)
        none = torch.zeros(2, device=device)
        summed = [torch.stack([none, *(e.float() for e in errors)]).sum(0) for errors in found]
        return [(error, total) for error, total in torch.stack(summed).tolist()]

    def _no_errors(self) -> list[tuple[float, float]]:
        return [(0.0, 0.0)] * len(self._groups)

    def _lanes_of_groups(self) -> list[list[Lane]]:
        engine = self._engine
        return [[x for n in group.names for x in engine.lanes_of(n)] for group in self._groups]

    def _calibrate_next(self) -> None:
        """Measures the next candidates on this rank; their numbers go with the next step."""
        if self.search.phase != "calibrate":
            self._sample = None
            return
        if self._sample is None:
            # The search has begun again; the next steps take samples.
            self._sample = self._new_sample()
        samples, size = self._sample.sampled(), self._engine.world_size
        for index in self.search.to_calibrate():
            plan = self.search.table.options[index].plan
            self._calibrations[index] = [
                calibrate(plan, sample, group.tensors, size, self._timer)
                for sample, group in zip(samples, self._groups, strict=True)
            ]

    def _new_sample(self) -> GradientSample:
        groups = self._lanes_of_groups()
        return GradientSample([{lane.name: lane.ctx.shape for lane in own} for own in groups])

    def _apply(self) -> None:
        """Switches to the chosen plan, after a dense step if residuals would be lost."""
        target = self.search.table.options[self.search.current]
        if self._choice == target.choice:
            return
        self._excluded = True
        lanes = [lane for lane in self._engine.lanes.values() if _loses(lane, target.plan)]
        if lanes and not self._is_flushing:
            self._is_flushing = True
            for lane in lanes:
                # Sends gradient and residual whole, so that nothing waits afterwards.
                dense = DENSE[torch.float32]
                lane.reconfigure(dense, ExchangeConfig("mean").wrap(dense))
            self._engine.drop_cuda_graphs()
            return
        self._switch(target)

    def _switch(self, target: Candidate) -> None:
        self._is_flushing, self._is_switching = False, True
        try:
            self._engine.switch(target.plan)
            for lane in self._engine.lanes.values():
                lane.sample_every = SAMPLE_EVERY
        finally:
            self._is_switching = False
        self._choice = target.choice

    def _log_decisions(self) -> None:
        """Logs the choice on rank 0, and the steps towards it as debug lines."""
        decisions = self.search.log.decisions
        for step, setting, reason in decisions[self._logged :] if self._engine.rank == 0 else ():
            level = logging.INFO if reason.startswith("settled") else logging.DEBUG
            log.log(level, "auto: from step %d: %s, %s", step, setting, reason)
        self._logged = len(decisions)

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        """Does nothing: neither costs nor risks depend on it."""

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        """Does nothing: neither costs nor risks depend on it."""

    def world_size_changed(self) -> None:
        self._forget()
        self.search.restart(self._engine.steps())

    def _forget(self) -> None:
        """Drops what was measured for the next message."""
        self._window, self._timed, self._errors = [], None, self._no_errors()
        self._calibrations, self._excluded = {}, True

    def stats(self) -> dict[str, object]:
        spec = format_spec(self.search.table.config)
        return {"spec": spec, **self.search.describe(), "decisions": self.search.log.rows()}

    def state_dict(self) -> dict[str, object]:
        return {
            "identity": identity_of(self.search.table.config),
            "log": [list(decision) for decision in self.search.log.decisions],
            "plan": [list(pair) for pair in self._choice],
            "search": self.search.state_dict(),
        }

    def adopt_plan(self, state: object) -> None:
        """Switches to the plan of a saved state."""
        self._check_saved(state)
        saved = state.get("plan") if isinstance(state, Mapping) else None
        try:
            choice = choice_of(saved)
            target = self.search.table.plans.of_choice(choice)
        except ValueError as error:
            raise ConfigError(
                f"state: auto: plan must be pairs of method and exchange, got {saved!r}"
            ) from error
        if self._choice != choice:
            self._switch(target)

    def _check_saved(self, state: object) -> None:
        if isinstance(state, Mapping):
            config = self.search.table.config
            check_saved_identity("auto", state.get("identity"), identity_of(config))

    def load_state_dict(self, state: object) -> None:
        """Continues the search of a saved run; raises ConfigError if it is not of this kind."""
        self.adopt_plan(state)
        self._forget()
        self._is_flushing = False
        try:
            match state:
                case {"log": list(rows), "search": dict(saved)}:
                    self.search.log.decisions = [Decision(*row) for row in rows]
                    self.search.load_state_dict(saved)
                case _:
                    raise ValueError("log or search is missing")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            # A state of another version has other entries.
            raise ConfigError(f"state: this is not a state of auto: {error!r}") from error
        self._logged = len(self.search.log.decisions)
        self._apply()


def _loses(lane: Lane, plan: Plan) -> bool:
    """Returns whether a plan has no place for what a lane's memory keeps."""
    memory = plan.method_of(lane.name).memory
    return bool(lane.memory_state) and not [*memory.state(1, torch.device("cpu"))]


def _typical(timings: Sequence[StepTiming]) -> StepTiming:
    """Returns what is typical of each number; unknown if there is no timing."""
    if not timings:
        return UNKNOWN
    return StepTiming(*(typical(column) for column in zip(*timings, strict=True)))
