"""Base of local-update methods: a torch optimizer whose steps are local, with periodic syncs.

Holds what all methods share: participants, checks at the start, statistics, state, the compression
plan of drifts, and the mean of all workers' models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias, TypeVar, cast, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.base import Compressor, Memory
from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.local.startup import (
    agreed,
    averaged,
    check_unchanged,
    checked_same,
    copied_from_first,
    followed,
    held,
)
from gradwire.local.state import load_tensors, read_state, summary, write_state
from gradwire.local.workers import Group, peers_of
from gradwire.spec import format_spec
from gradwire.types import State
from gradwire.version import VERSION

LocalNanPolicy: TypeAlias = Literal["raise", "ignore"]
"""What becomes of a sync in which a parameter is not finite on any worker.

raise: the optimiser's step raises NonFiniteError on all workers, and nothing is remembered of the
sync. ignore: nobody looks, and residuals need half the memory.
"""


def check_nan_policy(method: str, policy: str) -> None:
    """Raises ConfigError unless the policy is one for parameters."""
    known = [*get_args(LocalNanPolicy)]
    if policy not in known:
        # NaN in a gradient has a loss scaler skip the step; in a parameter it would stay.
        raise ConfigError(f"{method}: nan_policy must be one of {known}, got {policy!r}")


def drift_plan(
    method: str,
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """A legal plan; error feedback on what is no contraction is refused, and so are votes."""
    plan = make_plan(compressor, memory, exchange, list(tensors), size)
    if plan.counts_votes():
        raise ConfigError(
            f"{method}: {format_spec(plan.compressor)} with exchange {plan.exchange!r} says which "
            "way to go and not how far, which moves no parameter to where workers are"
        )
    return plan


def message_ratio(*lanes: Engine) -> float:
    """Bytes of all parameters over those of one worker's messages about them."""
    ways = [lane for one in lanes for lane in one.lanes.values()]
    said = sum(lane.compressor.nbytes(lane.ctx.shape) for lane in ways)
    return sum(t.nbytes for one in lanes for t in one.tensors.values()) / max(1, said)


def overall_ratio(updates: float | None, errors: float, sync_every: int) -> float:
    """R of 1/R = 1/R_updates + 1/(R_errors H); None says nothing of updates."""
    return 1 / ((1 / updates if updates is not None else 0.0) + 1 / (errors * sync_every))


S = TypeVar("S", bound="LocalSteps")


class LocalSteps(ABC):
    """A context in which a torch optimiser's steps are local and workers talk after some of them.

    Entered on all workers alike. Models must be equal then, or become so by `broadcast`, which
    takes worker 0's. Until it ends no mount and no other local method takes the same parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        check_whole(type(self).__name__, "sync_every", sync_every, 1)
        check_whole(type(self).__name__, "seed", seed, 0)
        self.model, self.optimizer, self.sync_every = model, optimizer, sync_every
        self.parameters = followed(model, optimizer)
        self.device = next(iter(self.parameters.values())).device
        self.seed, self.steps, self.syncs = seed, 0, 0
        self._broadcast = broadcast
        self._peers = peers_of(group, self.device)
        self._hook: RemovableHandle | None = None
        self._meet: Callable[[], CollectiveProgram[None]] | None = None
        self._leave: Callable[[bool], None] | None = None

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """What must be equal on all workers beside the parameters' forms."""

    @abstractmethod
    def planned_ratio(self) -> float:
        """How much less a worker is to say than at dense steps, by the forms of its messages."""

    @abstractmethod
    def _begin(self) -> None:
        """Takes the parameters as they are for the start that all workers share."""

    @abstractmethod
    def _step(self) -> None:
        """What this worker does after its optimiser's step number `self.steps`, counted from 1."""

    @abstractmethod
    def _lanes(self) -> Sequence[Engine]:
        """Everything that remembers what was said; the first describes the method."""

    @abstractmethod
    def _tensors(self) -> dict[str, State]:
        """What the method itself remembers, by kind and parameter; the tensors, not copies."""

    @abstractmethod
    def _common(self) -> Mapping[str, Tensor]:
        """What is the same on all workers, to the bit."""

    def __enter__(self: S) -> S:
        if self._hook is not None:
            raise ConfigError(f"{type(self).__name__} is entered already")
        check_free((parameter, name) for name, parameter in self.parameters.items())
        for lanes in self._lanes():
            self._peers.prepare(lanes.plan.node())
        self._peers.talk(self._entry(), aside=True)
        self._hook = self.optimizer.register_step_post_hook(self._after_step)
        claim(self.parameters.values(), self, way_out="end its context")
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Steps are no longer followed; what workers have not told each other stays theirs."""
        assert self._hook is not None
        self._hook.remove()
        self._hook = None
        release(self.parameters.values(), self)
        if self._leave is not None:
            self._leave(error is not None)
        # After an error others may never come to what is under way.
        self._peers.rest(wait=error is None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the mean of all workers' parameters and buffers, for evaluation.

        Called on all workers; afterwards each has its own again. Its bytes are counted aside.
        """
        floats = {n: t for n, t in held(self.model).items() if t.is_floating_point()}
        own = {name: tensor.clone() for name, tensor in floats.items()}
        self._peers.talk(averaged(floats), aside=True)
        try:
            yield
        finally:
            for name, tensor in floats.items():
                tensor.copy_(own[name])
            self._peers.check_over()

    def stats(self) -> dict[str, object]:
        """What was said, what it cost and what it lost, on this worker; `ratio` is to dense steps.

        A dense step is a ring all-reduce of all parameters after every optimiser step.
        """
        tensors = list(self.parameters.values())
        counts = {"steps": self.steps, "syncs": self.syncs, "planned_ratio": self.planned_ratio()}
        return {**summary(self._lanes(), self._peers, tensors, self.steps), **counts}

    def state_dict(self) -> dict[str, object]:
        """This worker's own state, as plain tensors and numbers under its rank's name.

        Models differ between workers too: each saves its model, its optimiser and this.
        """
        head = {**self._identity(), "steps": self.steps, "syncs": self.syncs}
        own = write_state(head, self._lanes(), self._tensors())
        return {f"rank{self._peers.rank}": own}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on exactly where this worker was saved; the model and optimiser are loaded apart."""
        if self._hook is not None:
            raise ConfigError("load the state before the context is entered")
        own = read_state(state, f"rank{self._peers.rank}", self._identity(), self._lanes())
        self.steps, self.syncs = cast(int, own["steps"]), cast(int, own["syncs"])
        load_tensors(self._tensors(), cast(Mapping[str, State], own["tensors"]))

    def _after_step(self, *_: object) -> None:
        check_unchanged(self.model, self.optimizer, self.parameters)
        self.steps += 1
        self._step()

    def _entry(self) -> CollectiveProgram[None]:
        # Those who meet nobody but a server have taken different numbers of steps.
        done = self.steps if self._meet is None else self.steps > 0
        still = {name: f"{form}, not trained" for name, form in _forms(held(self.model)).items()}
        settings = {**still, **self._identity(), "version": VERSION, "steps": done}
        yield from agreed(self._peers.size, self.device, settings)
        if self._broadcast and not self.steps:
            yield from copied_from_first(held(self.model))
        common = self._common() if self.steps else held(self.model)
        there = {name: tensor.to(self.device) for name, tensor in common.items()}
        yield from checked_same(there, self._peers.size)
        if not self.steps:
            self._begin()
        if self._meet is not None:
            yield from self._meet()

    def _identity(self) -> dict[str, object]:
        who = {"method": type(self).__name__, "sync_every": self.sync_every, "seed": self.seed}
        return {**who, **self.settings(), **_forms(self.parameters)}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    # Set apart from settings: a parameter may have any name.
    return {f"tensor {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
