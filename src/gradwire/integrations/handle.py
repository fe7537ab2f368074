"""Base class of all handles: the engine of a model, with its statistics, state and settings.

Subclasses decide where gradients come from and when they are exchanged.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.base import Compressor, Memory
from gradwire.checkpoint.state import (
    Residuals,
    all_or_nothing,
    load,
    load_resized,
    own_part,
    ranks_in_order,
    save,
)
from gradwire.comm.consistency import agree
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.control.base import Controller
from gradwire.control.timing import WallClock
from gradwire.engine.engine import Engine, NanPolicy
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.integrations.bucketing import LEAST_BYTES, Buckets, read_groups
from gradwire.spec import format_spec
from gradwire.version import VERSION

log = logging.getLogger("gradwire")

Planner: TypeAlias = Callable[
    [Compressor | str, Memory | str | None, str, Iterable[Tensor], int], Plan
]
"""Fills in what was left open of a method, and refuses what cannot work."""


class Options(NamedTuple):
    """What all mounts can be asked for beside the method."""

    seed: int = 0
    nan_policy: NanPolicy = "propagate"
    check_every: int = 0
    checksum: bool = False
    controller: Controller | None = None
    cuda_graphs: bool = True
    least_bytes: int | None = None
    """Buckets wait for each other until so many are to be said."""


class Wanted(NamedTuple):
    """A method as the user asked for it."""

    compressor: Compressor | str
    memory: Memory | str | None = None
    exchange: str = "auto"


class Handle(ABC):
    """Gradients that go through Gradwire, until `detach`."""

    has_slot: ClassVar[bool] = False
    """Whether the model itself has one place for it, so that a second one would be seen there."""
    overlaps: ClassVar[bool] = False
    """Whether training goes on meanwhile; then the meter is told how long it had to wait."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: Mapping[str, Tensor],
        parameters: Mapping[nn.Parameter, str],
        planner: Planner,
        wanted: Wanted,
        options: Options,
    ) -> None:
        check_free(parameters.items(), type(self) if self.has_slot else None)
        self._parameters = dict(parameters)
        self._device = next(iter(tensors.values())).device
        self._comm = ProcessGroupComm(group, checksum=options.checksum)
        self._planner = planner
        size, seed, policy = self._comm.size, options.seed, options.nan_policy
        plan = planner(*wanted, tensors.values(), size)
        self._lanes = Engine(
            plan, tensors, self._comm.rank, size, seed, policy, options.cuda_graphs
        )
        least_bytes = options.least_bytes
        if least_bytes is None:
            least_bytes = 0 if self._comm.is_direct(self._device) else LEAST_BYTES
        guards = {
            "nan_policy": policy,
            "check_every": options.check_every,
            "checksum": options.checksum,
            "least_bytes": least_bytes,
            "controller": "none" if options.controller is None else format_spec(options.controller),
        }
        # Without checksums, on which they have yet to agree.
        bare = ProcessGroupComm(group, self._comm.meter)
        agree(bare, self._device, {**_settings(plan, tensors, seed), **guards})
        if options.controller is not None:
            clock = WallClock(
                self._comm.meter, overlaps=self.overlaps, on_device=self._comm.on_device
            )
            self._lanes.steer(options.controller, clock)
        self._comm.prepare(plan.node())
        self._buckets = Buckets(least_bytes)
        self._check_every, self._passes = options.check_every, 0
        claim(self._parameters, self)
        log.info("attached: %s, kernels: %s", plan.describe(), self.stats()["backend"])

    @abstractmethod
    def _close(self) -> None:
        """Leaves the place where gradients come from."""

    @abstractmethod
    def _is_attached(self) -> bool: ...

    def _check_attached(self) -> None:
        if not self._is_attached():
            name = type(self).__name__.lower()
            raise ConfigError(f"this {name} is detached; attach the model again")

    def stats(self) -> dict[str, object]:
        """What was sent, what it cost and what it lost, on this rank, since attach."""
        return self._lanes.stats(self._comm.meter)

    def switch(
        self,
        compressor: Compressor | str,
        *,
        memory: Memory | str | None = None,
        exchange: str = "auto",
    ) -> None:
        """Changes the method between two steps, on all ranks alike.

        Residuals are kept where the new memory is of the same kind; what is dropped is logged.
        """
        self._check_attached()
        tensors = self._lanes.tensors
        plan = self._planner(compressor, memory, exchange, tensors.values(), self._comm.size)
        agree(self._comm, self._device, plan.describe())
        self._comm.prepare(plan.node())
        self._lanes.switch(plan)

    def learning_rate_changed(self, before: float, after: float) -> None:
        """Keeps what residuals will do to the parameters the same under another learning rate.

        A residual waits in units of the gradient: what a rate of `before` would have made of it,
        `after` makes of `before / after` times as much.
        """
        self._lanes.rate_changed(before, after)

    def epoch_ended(self, learning_rate: float | None = None) -> None:
        """Tells the controller, on all ranks alike, with the learning rate of the next epoch.

        Residuals stay as they are: for those there is `learning_rate_changed`.
        """
        self._check_attached()
        self._lanes.epoch_ended(learning_rate)

    def loss_scale_changed(self, scale: float) -> None:
        """Brings what residuals hold to the loss scale of the next backward pass."""
        self._lanes.follow_loss_scale(scale)

    def state_dict(self) -> dict[str, object]:
        """This rank's residuals and warm starts, as plain tensors and numbers under its own name.

        So ranks do not overwrite each other where their states meet, as in a distributed
        checkpoint.
        """
        return {self._key(): {**save(self._lanes), "buckets": self._buckets.last()}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on exactly where this rank was saved; called on all ranks, each with its own.

        Where one of them is refused, all are, and everything stays as it was.
        """
        self._check_attached()

        def take_up() -> list[list[str]]:
            own = own_part(state, self._key())
            buckets = read_groups(own.get("buckets"), self._lanes.tensors.keys())
            load(self._lanes, own)
            return buckets

        self._buckets.replay(self._load_alike(take_up))

    def load_resized(self, states: Sequence[Mapping[str, object]], *, residuals: Residuals) -> None:
        """Goes on where a run of another number of ranks was saved: their states, in order."""
        self._check_attached()

        def take_up() -> list[list[str]]:
            load_resized(self._lanes, ranks_in_order(states), residuals)
            return []

        self._load_alike(take_up)

    def _load_alike(self, load_own: Callable[[], list[list[str]]]) -> list[list[str]]:
        """Loads on all ranks or on none: steps and buckets that differ would mix up gradients."""
        with all_or_nothing(self._lanes):
            refused, found = None, list[list[str]]()
            try:
                found = load_own()
            except ConfigError as error:
                refused = error
            # Not by name, of which a complaint would have all.
            told = {"steps": self._lanes.steps(), "buckets": crc32(json.dumps(found).encode())}
            try:
                agree(self._comm, self._device, {"refused": str(refused)} if refused else told)
            except ConfigError as error:
                raise refused or error from None
            if refused:
                raise refused
        return found

    def _key(self) -> str:
        return f"rank{self._comm.rank}"

    def detach(self) -> None:
        """Back to dense gradients; what residuals hold is dropped, with a line in the log."""
        self._check_attached()
        norm = self.stats()["residual_norm"]
        if norm:
            log.info("detach: residuals of norm %.3g are dropped", norm)
        self._leave()

    def _leave(self) -> None:
        self._close()
        release(self._parameters, self)

    def _is_straight(self) -> bool:
        """Whether a plain mean of the gradients is all there is to do."""
        plain = self._lanes.is_straight() and self._lanes.plan.exchange == "mean"
        return plain and self._comm.is_direct(self._device)

    def _is_check_due(self) -> bool:
        """Whether ranks compare their parameters after this pass, which is counted."""
        self._passes += 1
        return self._check_every > 0 and self._passes % self._check_every == 0

    def _end_step(self) -> None:
        """Raises what the policy for gradients that are not finite says must be raised."""
        complaint = self._lanes.settle(wait=False)
        if complaint is not None:
            raise complaint


def _settings(plan: Plan, tensors: Mapping[str, Tensor], seed: int) -> dict[str, object]:
    """What must be equal on all ranks."""
    forms = {
        f"parameter {i}": f"{n} {tuple(t.shape)} {t.dtype}"
        for i, (n, t) in enumerate(tensors.items())
    }
    return {**plan.describe(), "seed": seed, "version": VERSION, **forms}


def at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
