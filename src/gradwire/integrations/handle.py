"""The handle that every integration returns: statistics, switching, checkpoints, detaching."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from threading import RLock
from typing import ClassVar, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import kernels
from gradwire.auto.assembly import automatic
from gradwire.auto.auto import check_ranks
from gradwire.auto.calibration import device_timer
from gradwire.auto.link_probe import check_backend, probe_link
from gradwire.base import Memory
from gradwire.checkpoint.state import (
    Residuals,
    all_or_nothing,
    load,
    load_resized,
    own_part,
    ranks_in_order,
    save,
)
from gradwire.comm.base import Collective
from gradwire.comm.consistency import check_equal_settings, check_on_all_ranks
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.timing import WallClock
from gradwire.engine.engine import Engine
from gradwire.engine.last_step import LastStep
from gradwire.engine.make_plan import Tensors
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.identity import code_digests, identity_of
from gradwire.integrations.bucketing import Buckets, default_least_bytes, read_groups
from gradwire.integrations.settings import Settings
from gradwire.policies import MethodSpec
from gradwire.version import VERSION

log = logging.getLogger("gradwire")

MOST_COMMUTATIVE = 2
"""Ranks up to which a sum does not depend on the order, and so not on the position in a bucket."""

Planner: TypeAlias = Callable[[MethodSpec, Memory | str | None, str, Tensors, int], Plan]
"""Makes a plan: chooses what was left open of a method, and refuses what cannot work."""


Self = TypeVar("Self", bound="Handle")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def between_steps(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Makes a method of a handle raise ConfigError while gradients are exchanged.

    It would change what the exchange uses, and its collectives would mix with those of buckets.
    """

    @wraps(method)
    def checked(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._lock:
            if self._is_in_backward():
                raise ConfigError(
                    f"{method.__name__}: a backward pass is under way; call it between backward "
                    "and the next forward pass"
                )
            self._complete_step()
            return method(self, *args, **kwargs)

    return checked


class OtherLeg(Protocol):
    """A second exchange of the same model, which its handle counts and saves along with the first.

    FSDP2 gathers weights beside the exchange of gradients.
    """

    def stats(self) -> dict[str, object]: ...

    def state(self) -> dict[str, object]: ...

    def check(self, state: Mapping[str, object]) -> int:
        """Returns the step of a saved state; raises ConfigError if it cannot be loaded."""

    def load(self, state: Mapping[str, object]) -> None: ...


class Handle(ABC):
    """A model whose gradients go through Gradwire, until `detach`."""

    has_slot: ClassVar[bool] = False
    """True if the model has one hook slot, so that a second handle would be noticed there."""
    overlaps: ClassVar[bool] = False
    """True if training goes on during the exchange; then the meter counts the time it waits."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: Mapping[str, Tensor],
        parameters: Mapping[nn.Parameter, str],
        planner: Planner,
        settings: Settings,
        discards_lanes: bool = False,
        adaptive: bool | None = None,
        identity: Mapping[str, object] | None = None,
    ) -> None:
        """`adaptive` is whether the optimiser rescales every entry, None if it is not known.

        `identity` is what else must be equal on all ranks.
        """
        # Held by whoever uses the engine: a step that begins, or a method called in any thread.
        self._lock = RLock()
        check_free(parameters.items(), type(self) if self.has_slot else None)
        self._parameters = dict(parameters)
        self._device = next(iter(tensors.values())).device
        self._comm = ProcessGroupComm(group, checksum=settings.checksum)
        # For checks between ranks, whose bytes are not those of the method.
        self._check_comm = ProcessGroupComm(group, checksum=settings.checksum)
        self._planner = planner
        auto = settings.auto()
        if auto is not None:
            check_ranks(self._comm.size)
            check_backend(dist.get_backend(group))
        plan = planner(
            settings.first_method(),
            settings.memory,
            settings.exchange,
            tensors,
            self._comm.size,
        )
        self._engine = Engine(
            plan,
            tensors,
            self._comm.rank,
            self._comm.size,
            settings.seed,
            settings.nan_policy,
            settings.cuda_graphs,
            discards_lanes=discards_lanes,
        )
        least_bytes = settings.least_bytes
        if least_bytes is None:
            direct = self._comm.is_direct(self._device)
            least_bytes = default_least_bytes(is_direct=direct, has_rounds=plan.has_rounds)
        controller = settings.make_controller()
        # Without checksums, which are part of what ranks have yet to agree on.
        check_equal_settings(
            ProcessGroupComm(group, self._check_comm.meter),
            self._device,
            {
                **_identity(plan, tensors, settings.seed),
                "nan_policy": settings.nan_policy,
                "check_every": settings.check_every,
                "checksum": settings.checksum,
                "least_bytes": least_bytes,
                "controller": None if controller is None else identity_of(controller),
                "auto": None if auto is None else {**identity_of(auto), "adaptive": adaptive},
                "code": {**plan.code_digests(), **code_digests(controller)},
                **(identity or {}),
            },
        )
        self._other_leg: OtherLeg | None = None
        clock = WallClock(self._comm.meter, overlaps=self.overlaps, on_device=self._comm.on_device)
        if controller is not None:
            self._engine.observer = ControllerRuntime(controller, self._engine, clock)
        if auto is not None:
            self._engine.observer = automatic(
                auto,
                self._engine,
                clock,
                device_timer(self._device),
                probe_link(self._check_comm, self._device),
                adaptive,
                self.overlaps,
            )
        self._comm.prepare(plan.node)
        self._buckets = Buckets(least_bytes)
        self._check_every, self._passes = settings.check_every, 0
        exposes = "unknown" if self._comm.on_device else "waits" if self.overlaps else "all"
        self._last_step = LastStep(self._comm.meter, exposes)
        claim(self._parameters, self)
        self._log("attached: %s, kernels: %s", plan.describe(), kernels.backend_for(self._device))

    @abstractmethod
    def _close(self) -> None:
        """Removes the hooks through which gradients come."""

    @abstractmethod
    def _is_attached(self) -> bool: ...

    @abstractmethod
    def _is_in_backward(self) -> bool:
        """Returns whether a backward pass is under way in which gradients are exchanged."""

    @abstractmethod
    def _complete_step(self) -> None:
        """Ends the last step if that is still to be done; no backward pass is under way."""

    @abstractmethod
    def _count_framework_passes(self) -> None:
        """Counts the passes that were left to the framework since the last call."""

    @abstractmethod
    def _prepare_own_exchange(self, requester: str) -> Callable[[], None]:
        """Returns a function that begins to exchange gradients here, and cannot fail on one rank.

        It does nothing if they were not left to the framework so far. Raises ConfigError, which
        names the requester, if another hook is in the way; called on all ranks between two steps.
        """

    def _check_attached(self) -> None:
        if not self._is_attached():
            name = type(self).__name__.lower()
            raise ConfigError(f"this {name} is detached; attach the model again")

    def stats(self) -> dict[str, object]:
        """Returns bytes, times and errors of this rank since attach; may be called at any time.

        `auxiliary_bytes` are those of checks between ranks, which no other number includes. Where
        the exchange overlaps with backward, `waited_s` is the time that backward waited for it, and
        `hidden` the share of the time of encoding, wire and decoding that it did not wait for.
        """
        meter = self._comm.meter
        with self._lock:
            if not self._is_in_backward():
                self._complete_step()
            own = self._engine.stats(meter)
        overlap = {"waited_s": meter.waited_s, "hidden": meter.hidden()} if self.overlaps else {}
        other = {} if self._other_leg is None else self._other_leg.stats()
        auxiliary = {"auxiliary_bytes": self._check_comm.meter.sent_bytes}
        return {**own, **overlap, **other, **auxiliary}

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of this rank's last step, to be logged after every step or some of them.

        Bytes, collectives, the time since the step before (`step_s`) and that of the exchange:
        `exposed_s` of it delayed training, `hidden_s` did not. On NCCL and in DDP's own reducer the
        times of the exchange are unknown, and left out. `relative_error` and `residual_norm` are
        there after the first step, then once in 100 steps: they cost a pass over the residuals and
        on a GPU a wait. All else is counted in any case, and costs no wait. No other rank takes
        part. May be called at any time; empty before the first step.
        """
        with self._lock:
            running = self._is_in_backward()
            if not running:
                self._count_framework_passes()
            exchanges = None if running else self._passes
            return self._last_step.numbers(prefix, self._passes, [self._engine], exchanges)

    def passes(self) -> int:
        """Returns how many backward passes were exchanged here; may be called at any time.

        Those that were left to the framework are counted when they are asked for in `stats`.
        """
        return self._passes

    @between_steps
    def switch(
        self,
        compressor: MethodSpec,
        *,
        memory: Memory | str | None = None,
        exchange: str = "auto",
    ) -> None:
        """Changes the method between two steps; called on all ranks.

        Residuals are kept if the new memory is of the same kind; dropped ones are logged.
        """
        self._check_attached()
        tensors = self._engine.tensors
        plan = self._planner(compressor, memory, exchange, tensors, self._comm.size)
        refused, begin_exchange = None, _nothing
        if not plan.is_plain_mean:
            try:
                begin_exchange = self._prepare_own_exchange("switch")
            except ConfigError as error:
                refused = error
        settings = {**plan.identity(), "code": plan.code_digests()}
        check_on_all_ranks(self._check_comm, self._device, settings, refused)
        self._comm.prepare(plan.node)
        begin_exchange()
        has_own_moments = self._engine.plan.sends_updates
        self._engine.switch(plan)
        if plan.updates_mean and has_own_moments:
            self._average_moments()

    def _average_moments(self) -> None:
        """Replaces the moments of an optimiser by their mean over ranks, equal on all of them."""
        for moment in self._engine.moments():
            [mean] = self._check_comm.run(Collective("mean", [moment.clone()]))
            moment.copy_(mean)

    @between_steps
    def learning_rate_changed(self, before: float, after: float) -> None:
        """Rescales residuals, so that their effect on the parameters stays the same.

        A residual waits in units of the gradient: at the rate `after` it takes `before / after`
        times as much of it to move the parameters as far as at the rate `before`.
        """
        self._engine.learning_rate_changed(before, after)

    @between_steps
    def epoch_ended(self, learning_rate: float | None = None) -> None:
        """Informs the controller, with the learning rate of the next epoch; called on all ranks.

        Residuals stay as they are; `learning_rate_changed` rescales them.
        """
        self._check_attached()
        self._engine.epoch_ended(learning_rate)

    @between_steps
    def loss_scale_changed(self, scale: float) -> None:
        """Converts residuals to the loss scale of the next backward pass."""
        self._engine.loss_scale_changed(scale)

    @between_steps
    def state_dict(self) -> dict[str, object]:
        """Returns this rank's residuals and warm starts, as tensors and numbers.

        The top-level key names the rank, so that ranks do not overwrite each other in a distributed
        checkpoint.
        """
        other = {} if self._other_leg is None else self._other_leg.state()
        return {self._key(): {**save(self._engine), "buckets": self._buckets.last(), **other}}

    @between_steps
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues exactly where this rank was saved; called on all ranks, each with its own.

        If a rank refuses its state, all ranks do, and nothing changes.
        """
        self._check_attached()

        begin_exchange = _nothing

        def load_own() -> list[list[str]]:
            nonlocal begin_exchange
            own = own_part(state, self._key())
            buckets = read_groups(own.get("buckets"), self._engine.tensors.keys())
            if buckets and self._comm.size > MOST_COMMUTATIVE:
                # Only our own exchange can follow the buckets of the saved run.
                begin_exchange = self._prepare_own_exchange("load_state_dict")
            load(self._engine, own)
            return buckets

        groups = self._load_on_all_ranks(load_own, lambda: own_part(state, self._key()))
        begin_exchange()
        self._buckets.replay(groups)

    @between_steps
    def load_resized(self, states: Sequence[Mapping[str, object]], *, residuals: Residuals) -> None:
        """Continues a run of another number of ranks, from the states of all its ranks in order."""
        self._check_attached()

        def load_own() -> list[list[str]]:
            load_resized(self._engine, ranks_in_order(states), residuals)
            return []

        # Ranks may be more than before; what the other leg saves is equal on all of them.
        self._load_on_all_ranks(load_own, lambda: ranks_in_order(states)[0])

    def _load_on_all_ranks(
        self, load_own: Callable[[], list[list[str]]], other: Callable[[], Mapping[str, object]]
    ) -> list[list[str]]:
        """Loads on all ranks or none: different steps or buckets would mix up gradients.

        `other` returns the state that holds that of the other leg.
        """
        with all_or_nothing(self._engine):
            refused, found = None, list[list[str]]()
            loaded: dict[str, object] = {}
            try:
                found = load_own()
                loaded["other leg"] = self._check_other_leg(other())
            except ConfigError as error:
                refused = error
            # A checksum of the buckets: an error text with all names would be too long.
            loaded["buckets"] = crc32(json.dumps(found).encode())
            if not self._may_differ_in_steps():
                loaded["steps"] = self._engine.steps()
            check_on_all_ranks(self._check_comm, self._device, loaded, refused)
        if self._may_differ_in_steps():
            self._agree_on_steps()
        if self._other_leg is not None:
            self._other_leg.load(other())
        return found

    def _check_other_leg(self, state: Mapping[str, object]) -> int | None:
        """Returns the step of the other leg's saved state, if this model has one."""
        if self._other_leg is not None:
            return self._other_leg.check(state)
        if "weights" in state:
            raise ConfigError(
                f"state: was saved with weights, as {state['weights']}; attach with them"
            )
        return None

    def _may_differ_in_steps(self) -> bool:
        """Returns whether ranks may have counted different steps: DDP averages for those that join.

        No result depends on the count while gradients are sent as they are.
        """
        return self._engine.plan.is_plain_mean and self._engine.observer is None

    def _agree_on_steps(self) -> None:
        """Adopts, by parameter, the steps of the rank that has counted most."""
        names = list(self._engine.tensors)
        own = torch.tensor([self._engine.steps_of(name) for name in names], device=self._device)
        sizes = [own.nbytes] * self._comm.size
        found = self._check_comm.run(Collective("gather", [own.view(torch.uint8)], sizes))
        most = torch.stack([steps.view(torch.int64) for steps in found]).amax(0)
        self._engine.set_steps(dict(zip(names, most.tolist(), strict=True)))

    def _key(self) -> str:
        return f"rank{self._comm.rank}"

    @between_steps
    def detach(self) -> None:
        """Returns to dense gradients; residuals are dropped, with a line in the log."""
        self._check_attached()
        norm = self.stats()["residual_norm"]
        if norm:
            self._log("detach: residuals of norm %.3g are dropped", norm)
        self._release()

    def _release(self) -> None:
        self._close()
        self._engine.drop_cuda_graphs()
        release(self._parameters, self)

    def _is_plain_mean(self) -> bool:
        """Returns whether the gradients can be averaged as they lie in memory."""
        plain = self._engine.is_plain_mean() and self._engine.plan.is_plain_mean
        return plain and self._comm.is_direct(self._device)

    def _is_check_due(self) -> bool:
        """Counts a backward pass; returns whether ranks compare their parameters after it."""
        self._passes += 1
        return self._check_every > 0 and self._passes % self._check_every == 0

    def _log(self, text: str, *values: object) -> None:
        """Logs a line that is alike on all ranks: as information on rank 0, else for debugging."""
        log.log(logging.INFO if self._comm.rank == 0 else logging.DEBUG, text, *values)

    def _end_step(self) -> None:
        """Commits the step, and raises NonFiniteError if the policy asks for it."""
        self._last_step.end(self._engine.dense_bytes)
        error = self._engine.commit_step(wait=False)
        if error is not None:
            raise error


def _nothing() -> None:
    pass


def _identity(plan: Plan, tensors: Mapping[str, Tensor], seed: int) -> dict[str, object]:
    """Returns what must be equal on all ranks."""
    shapes = {
        f"parameter {i}": f"{n} {tuple(t.shape)} {t.dtype}"
        for i, (n, t) in enumerate(tensors.items())
    }
    return {**plan.identity(), "seed": seed, "version": VERSION, **shapes}
