"""Base of local-update methods: a torch optimizer whose steps are local, with periodic syncs.

Holds what all methods share: participants, checks at the start, statistics, state, the compression
plan of drifts, and the mean of all workers' models.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, TypeAlias, TypeVar, get_args

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.base import Memory
from gradwire.checkpoint.state import own_part
from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.meter import ring_bytes
from gradwire.engine.engine import Engine
from gradwire.engine.last_step import LastStep
from gradwire.engine.make_plan import Tensors, make_plan
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.identity import class_name, code_digests
from gradwire.local.ddp_guard import check_no_ddp, guard_forward
from gradwire.local.island import Island, ShardedModel, local_part
from gradwire.local.optimizers import (
    Optimizers,
    StepFollower,
    check_covered,
    check_not_shared,
    check_unchanged,
    optimizer_list,
    trained_parameters,
)
from gradwire.local.sharded_state import from_sharded, to_sharded
from gradwire.local.startup import (
    average_tensors,
    broadcast_tensors,
    check_settings,
    check_tensors,
    state_tensors,
)
from gradwire.local.state import read_state, summary, write_state
from gradwire.local.workers import Group, ranks_of, workers_of
from gradwire.policies import MethodSpec
from gradwire.spec import format_spec
from gradwire.types import State
from gradwire.version import VERSION

LocalNanPolicy: TypeAlias = Literal["raise", "ignore"]
"""Decides about a sync in which a parameter is not finite on at least one worker.

raise: the optimiser's step raises NonFiniteError on all workers, and the sync leaves no trace in
their states. ignore: nothing is checked, and residuals need half the memory.
"""


def check_nan_policy(method: str, policy: str) -> None:
    """Raises ConfigError unless the policy is one for parameters."""
    known = [*get_args(LocalNanPolicy)]
    if policy not in known:
        # A loss scaler skips the step after a NaN in a gradient; in a parameter it would stay.
        raise ConfigError(f"{method}: nan_policy must be one of {known}, got {policy!r}")


def drift_plan(
    method: str,
    compressor: MethodSpec,
    memory: Memory | str | None,
    exchange: str,
    tensors: Tensors,
    size: int,
) -> Plan:
    """Makes the plan of a drift; refuses majority votes, and error feedback on no contraction."""
    plan = make_plan(compressor, memory, exchange, tensors, size)
    for used in plan.methods:
        if used.counts_votes:
            raise ConfigError(
                f"{method}: {format_spec(used.compressor)} with exchange '{used.exchange}' sends "
                "the direction of a drift and not its length, which cannot synchronise parameters"
            )
    return plan


def message_ratio(*engines: Engine) -> float:
    """Returns the bytes of all parameters over those of one worker's messages about them."""
    lanes = [lane for engine in engines for lane in engine.lanes.values()]
    message_bytes = sum(lane.compressor.nbytes(lane.ctx.shape) for lane in lanes)
    parameter_bytes = sum(t.nbytes for engine in engines for t in engine.tensors.values())
    return parameter_bytes / max(1, message_bytes)


def overall_ratio(updates: float | None, errors: float, sync_every: int) -> float:
    """Returns R of 1/R = 1/R_updates + 1/(R_errors H); None means that no updates are sent."""
    return 1 / ((1 / updates if updates is not None else 0.0) + 1 / (errors * sync_every))


S = TypeVar("S", bound="LocalMethod")


class LocalMethod(ABC):
    """A context in which a torch optimiser's steps are local, and some are followed by a sync.

    It is entered on all workers alike. Their models must be equal then, or `broadcast` makes them
    equal to worker 0's. The optimiser has all trainable parameters of the model, or several have
    one part each, and a step of the method is one step of each of them. Until the context ends no
    integration and no other local method may own the same parameters, and no
    DistributedDataParallel over all workers may average their gradients.
    """

    takes_shards: ClassVar[bool] = True
    """True if a model may be sharded inside islands."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        sync_every: int,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        method = type(self).__name__
        check_whole(method, "sync_every", sync_every, 1)
        check_whole(method, "seed", seed, 0)
        self.model, self.optimizers = model, optimizer_list(model, optimizer)
        self.sync_every = sync_every
        self._sharded = ShardedModel(method, model)
        if self._sharded.tensors:
            self._sharded.check_workers(ranks_of(group), self.takes_shards)
        self.parameters = trained_parameters(method, model, self.optimizers)
        self.device = next(iter(self.parameters.values())).device
        self.seed, self.steps, self.syncs = seed, 0, 0
        self._broadcast = broadcast
        self._ranks = ranks_of(group)
        check_no_ddp(method, model, self._ranks)
        # Last, since creating a group is a collective call.
        self._workers = workers_of(group, self.device)
        self._island = Island(self._sharded.tensors, self.device)
        self._follower: StepFollower | None = None
        self._guard: RemovableHandle | None = None
        self._connect: Callable[[], CollectiveProgram[None]] | None = None
        self._disconnect: Callable[[bool], None] | None = None
        # Called with the arguments of the first optimiser's hook.
        self._before_step: Callable[..., None] | None = None
        self._own_stats: Callable[[], Mapping[str, object]] | None = None
        # Syncs may run in the background, and the time for which they delay a step is not counted.
        self._last_step = LastStep(self._workers.meter, "unknown")

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Returns what must be equal on all workers, besides shapes and types of parameters."""

    @abstractmethod
    def planned_ratio(self) -> float:
        """Returns the planned compression ratio over dense steps, from the message lengths."""

    @abstractmethod
    def _initialize(self) -> None:
        """Takes the current parameters as the starting point of all workers."""

    @abstractmethod
    def _step(self) -> None:
        """Does this worker's part after step `self.steps` of all optimisers, counted from 1."""

    @abstractmethod
    def _engines(self) -> Sequence[Engine]:
        """Returns all engines with state to save; the first one's plan describes the method."""

    @abstractmethod
    def _tensors(self) -> dict[str, State]:
        """Returns the method's own state by kind and parameter; the tensors, not copies."""

    @abstractmethod
    def _common(self) -> Mapping[str, Tensor]:
        """Returns the tensors that are bitwise equal on all workers."""

    def __enter__(self: S) -> S:
        if self._follower is not None:
            raise ConfigError(f"{type(self).__name__} is entered already")
        self._sharded.reshard()
        self._check_parameters(with_model=True)
        check_not_shared(type(self).__name__, self.optimizers)
        check_free((parameter, name) for name, parameter in self.parameters.items())
        for engine in self._engines():
            self._workers.prepare(engine.plan.node)
            engine.any_rank = self._island.any_rank if self._island.place else None
        with self._island.same_errors():
            self._workers.run(self._startup(), auxiliary=True)
        before, after = self._before_step, self._after_step
        self._follower = StepFollower(self, self.optimizers, after, before)
        parameters = self.parameters.values()
        self._guard = guard_forward(type(self).__name__, self.model, parameters, self._ranks)
        claim(self.parameters.values(), self, how_to_release="end its context")
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Stops following the optimiser's steps; drifts that were not synchronised stay local."""
        assert self._follower is not None
        self._follower.end()
        self._follower = None
        self._remove_guard()
        release(self.parameters.values(), self)
        if self._disconnect is not None:
            self._disconnect(error is not None)
        # After an error other workers may never join the collectives under way.
        if error is not None:
            self._island.abandon()
        self._workers.shutdown(wait=error is None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the mean of all workers' parameters and buffers, for evaluation.

        Called on all workers; afterwards each has its own again. Its bytes are counted apart.
        """
        floats = self._floats()
        own = {name: tensor.clone() for name, tensor in floats.items()}
        self._workers.run(average_tensors(floats), auxiliary=True)
        try:
            yield
        finally:
            # Not those from before: the first forward pass of FSDP2 moves its shards.
            for name, tensor in self._floats().items():
                tensor.copy_(own[name])
            self._workers.check_finished()

    def _floats(self) -> dict[str, Tensor]:
        """Returns this rank's parts of all parameters and buffers of floating point."""
        self._sharded.reshard()
        return {n: t for n, t in state_tensors(self.model).items() if t.is_floating_point()}

    def stats(self) -> dict[str, object]:
        """Returns traffic, times and compression errors of this worker; `ratio` is to dense steps.

        A dense step is a ring all-reduce of all parameters after every optimiser step.
        """
        tensors = [local_part(parameter) for parameter in self.parameters.values()]
        counts = {"steps": self.steps, "syncs": self.syncs, "planned_ratio": self.planned_ratio()}
        own = {} if self._own_stats is None else self._own_stats()
        return {**summary(self._engines(), self._workers, tensors, self.steps), **counts, **own}

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of this worker's last optimiser step, to be logged after each of them.

        Bytes and collectives are those since the step before, 0 where nothing was sent; `syncs` and
        `step` are counts. `relative_error` and `residual_norm` are there after the first sync, then
        once in 100: they cost a pass over the residuals, and on a GPU a wait. No other worker takes
        part. Empty before the first step.
        """
        own = {f"{prefix}syncs": float(self.syncs)}
        exchanges = self.syncs if self.syncs else None
        found = self._last_step.numbers(prefix, self.steps, self._engines(), exchanges)
        return {**found, **own} if found else {}

    def state_dict(self) -> dict[str, object]:
        """Returns this worker's own state, as plain tensors and numbers under its rank's name.

        Models differ between workers too: each saves its model, its optimiser and this. In an
        island, whose ranks share a name, torch.distributed.checkpoint saves it with DTensors.
        """
        if self._follower is not None:
            self._follower.check_complete("state_dict() is called")
        identity = json.dumps(self._identity())
        header = {"identity": identity, "steps": self.steps, "syncs": self.syncs}
        own = write_state(header, self._engines(), self._tensors())
        if self._sharded.tensors:
            own = to_sharded(own, self._sharded.tensors, self._island.place)
        return {f"rank{self._workers.rank}": own}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores this worker's state bitwise; the model and optimiser are loaded separately."""
        if self._follower is not None:
            raise ConfigError("load the state before the context is entered")
        own = own_part(state, f"rank{self._workers.rank}")
        if self._sharded.tensors:
            own = from_sharded(own, self._island.place)
        engines, tensors = self._engines(), self._tensors()
        self.steps, self.syncs = read_state(own, self._identity(), engines, tensors)

    def _after_step(self) -> None:
        # The model has to be traversed for it, which is not for every step.
        self._check_parameters(with_model=(self.steps + 1) % self.sync_every == 0)
        # Gradients of the first step have shown whether a DDP exchanges them.
        self._remove_guard()
        self.steps += 1
        self._step()
        nbytes = sum(local_part(parameter).nbytes for parameter in self.parameters.values())
        self._last_step.end(self.steps * ring_bytes(nbytes, self._workers.size))

    def _check_parameters(self, *, with_model: bool) -> None:
        method = type(self).__name__
        check_unchanged(method, self.model, self.optimizers, self.parameters)
        if with_model:
            check_covered(method, self.model, self.parameters)

    def _remove_guard(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _startup(self) -> CollectiveProgram[None]:
        # Workers that synchronise only with a server have taken different numbers of steps.
        done = self.steps if self._connect is None else self.steps > 0
        shapes = _shapes(state_tensors(self.model))
        untrained = {name: f"{shape}, not trained" for name, shape in shapes.items()}
        engines = self._engines()
        code = code_digests(type(self))
        for engine in engines:
            code |= engine.plan.code_digests()
        settings = {
            **untrained,
            **self._identity(),
            **self._sharded.layouts(),
            "place in the island": self._island.place,
            "version": VERSION,
            "steps": done,
            "broadcast": self._broadcast,
            "nan_policy": [engine.nan_policy for engine in engines],
            "code": code,
        }
        yield from check_settings(self._workers.size, self.device, settings)
        if self._broadcast and not self.steps:
            yield from broadcast_tensors(state_tensors(self.model))
        common = self._common() if self.steps else state_tensors(self.model)
        on_device = {name: tensor.to(self.device) for name, tensor in common.items()}
        yield from check_tensors(on_device, self._workers.size)
        if not self.steps:
            self._initialize()
        if self._connect is not None:
            yield from self._connect()

    def _identity(self) -> dict[str, object]:
        method = class_name(type(self))
        basic = {"method": method, "sync_every": self.sync_every, "seed": self.seed}
        return {**basic, **self.settings(), **_shapes(self.parameters)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    # Prefixed, since a parameter may have the name of a setting.
    return {f"tensor {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
