"""DistributedDataParallel: one line that compresses the gradients of a DDP script."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from laconic.checkpoint import Residuals, load, load_resized, save
from laconic.checks import check_whole
from laconic.comm.agree import agree
from laconic.comm.base import Conversation, drive
from laconic.comm.drift import check_same
from laconic.comm.groups import borrow
from laconic.comm.torch import TorchComm
from laconic.contract import Compressor, Memory
from laconic.errors import ConfigError
from laconic.lanes import Lanes, NanPolicy
from laconic.mount.buckets import Buckets, Load
from laconic.mount.courier import OnStream, OnThread
from laconic.plan import Plan, make_plan
from laconic.version import VERSION

log = logging.getLogger("laconic")


class Slot:
    """DDP's only hook slot, which cannot be emptied again; but who answers in it can change."""

    def __init__(self, model: DDP) -> None:
        self.device = next(model.parameters()).device
        self.dense_group = model.process_group
        self.link: Link | None = None


# A hook stays for the life of its DDP, and this must not prolong it.
_slots: WeakKeyDictionary[DDP, Slot] = WeakKeyDictionary()

_orphans: list[Slot] = []
"""Slots whose model died attached. Who collects it may hold any lock, so it is only noted there."""


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _hook(state: Slot, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    if isinstance(bucket, tuple):
        raise ConfigError(
            "compiled autograd's python_reducer hands over single gradients instead of buckets; "
            "set torch._dynamo.config.optimize_ddp = True"
        )
    if state.link is None:
        return allreduce_hook(state.dense_group, bucket)
    return state.link._reduce(bucket)


class Link:
    """A DDP model whose gradients go through Laconic, until `detach`."""

    def __init__(
        self,
        slot: Slot,
        group: dist.ProcessGroup,
        plan: Plan,
        names: dict[nn.Parameter, str],
        seed: int,
        nan_policy: NanPolicy,
        check_every: int,
        checksum: bool,
    ) -> None:
        self._slot = slot
        self._names = names
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        self._lanes = Lanes(plan, tensors, group.rank(), group.size(), seed, nan_policy)
        self._loan = borrow(group, slot.device)
        self._comm = TorchComm(self._loan.group, checksum=checksum)
        guards = {"nan_policy": nan_policy, "check_every": check_every, "checksum": checksum}
        try:
            agree(self._comm, slot.device, {**_settings(plan, tensors, seed), **guards})
        except ConfigError:
            self._loan.give_back()
            raise
        self._comm.prepare(plan.node())
        self._settling = False
        self._courier = (OnStream if self._comm.on_device else OnThread)(slot.device)
        self._buckets = Buckets()
        self._check_every, self._passes = check_every, 0
        self._hooks: list[RemovableHandle] = []

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
        """Changes the method between two steps, on all ranks alike; residuals are kept."""
        self._check_attached()
        tensors = self._lanes.tensors
        plan = make_plan(compressor, memory, exchange, tensors.values(), self._comm.size)
        agree(self._comm, self._slot.device, plan.describe())
        self._comm.prepare(plan.node())
        self._lanes.switch(plan)

    def learning_rate_changed(self, before: float, after: float) -> None:
        """Keeps what residuals will do to the parameters the same under another learning rate.

        A residual waits in units of the gradient: what a rate of `before` would have made of it,
        `after` makes of `before / after` times as much.
        """
        if before <= 0 or after <= 0:
            raise ConfigError(f"learning rates must be positive, got {before} and {after}")
        self._lanes.rescale(before / after)

    def loss_scale_changed(self, scale: float) -> None:
        """Brings what residuals hold to the loss scale of the next backward pass."""
        if not scale > 0:
            raise ConfigError(f"the loss scale must be positive, got {scale}")
        self._lanes.follow_loss_scale(scale)

    def state_dict(self) -> dict[str, object]:
        """This rank's residuals and warm starts, as plain tensors and numbers under its own name.

        So ranks do not overwrite each other where their states meet, as in a distributed
        checkpoint.
        """
        return {self._key(): {**save(self._lanes), "buckets": self._buckets.last()}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on exactly where this rank was saved."""
        key = self._key()
        if key not in state:
            raise ConfigError(
                f"state: has {sorted(state)}, but not {key}; every rank saves its own"
            )
        own = cast(Mapping[str, object], state[key])
        load(self._lanes, own)
        self._buckets.replay(cast(list[list[str]], own["buckets"]))

    def load_resized(self, states: Sequence[Mapping[str, object]], *, residuals: Residuals) -> None:
        """Goes on where a run of another number of ranks was saved: their states, in order."""
        merged = {key: value for state in states for key, value in state.items()}
        ranks = [merged.get(f"rank{rank}") for rank in range(len(states))]
        if None in ranks or len(merged) != len(states):
            raise ConfigError(f"state: expected ranks 0 to {len(states) - 1}, got {sorted(merged)}")
        load_resized(self._lanes, cast(list[Mapping[str, object]], ranks), residuals)

    def _key(self) -> str:
        return f"rank{self._comm.rank}"

    def detach(self) -> None:
        """Back to DDP's dense mean; what residuals hold is dropped, with a line in the log."""
        self._check_attached()
        norm = self.stats()["residual_norm"]
        if norm:
            log.info("detach: residuals of norm %.3g are dropped", norm)
        self._slot.link = None
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _close(self) -> None:
        self._courier.close()
        if self._courier.sound():
            self._loan.give_back()

    def _follow(self, model: DDP, scaler: torch.amp.GradScaler) -> None:
        def read(*_: object) -> None:
            # Before the forward pass the GPU has little left to do, so asking it costs little.
            self.loss_scale_changed(scaler.get_scale())

        self._hooks.append(model.register_forward_pre_hook(read))

    def _check_attached(self) -> None:
        if self._slot.link is not self:
            raise ConfigError("this link is detached; attach the model again")

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        names = [self._names[p] for p in bucket.parameters()]
        future = self._courier.future()
        ready = self._buckets.add(
            Load(names, bucket.gradients(), bucket.buffer(), future), bucket.is_last()
        )
        if ready is not None:
            # Taken up here, since here the lanes are at rest between two steps.
            talks = [self._lanes.talk(*message) for message in ready.messages]
            self._courier.send(lambda: self._carry(talks), ready.loads)
        self._settle_after_backward()
        return future

    def _carry(self, talks: list[Conversation[list[Tensor]]]) -> None:
        for talk in talks:
            drive(talk, self._comm)

    def _settle_after_backward(self) -> None:
        """Sees to it that what goes wrong on the way is raised by `backward`, as what it is."""
        if torch._C._current_graph_task_id() == -1:
            # DDP's join calls the hook outside a backward pass.
            self._settle()
        elif not self._settling:
            self._settling = True
            # By way of a first callback, since DDP's own comes in between and must not be missed.
            _at_end_of_backward(lambda: _at_end_of_backward(self._settle))

    def _settle(self) -> None:
        self._settling = False
        self._courier.send(self._lanes.finish, [])
        self._passes += 1
        if self._check_every and self._passes % self._check_every == 0:
            self._courier.send(lambda: check_same(self._comm, self._lanes.tensors), [])
        self._courier.settle()
        complaint = self._lanes.settle(wait=False)
        if complaint is not None:
            raise complaint


def attach(
    model: DDP,
    compressor: Compressor | str,
    *,
    memory: Memory | str | None = None,
    exchange: str = "auto",
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    nan_policy: NanPolicy = "propagate",
    scaler: torch.amp.GradScaler | None = None,
    check_every: int = 0,
    checksum: bool = False,
) -> Link:
    """Compresses the gradients of a DDP model from the next backward pass on.

    Called on all ranks of the model's group, which check that they agree. Memory None means the
    residual where the method needs it; exchange "auto" means the cheapest that can carry it. A
    `scaler` is asked for its loss scale before every forward pass, and residuals follow it. Every
    `check_every` backward passes ranks compare their parameters, unless it is 0. With `checksum` a
    CRC goes behind every message that is not summed up on the way.
    """
    while _orphans:
        _bury(_orphans.pop())
    check_whole("attach", "check_every", check_every, 0)
    names = _names(model)
    group = process_group or model.process_group
    plan = make_plan(compressor, memory, exchange, names, group.size())
    slot = _take_slot(model)
    slot.link = Link(slot, group, plan, names, seed, nan_policy, check_every, checksum)
    if scaler is not None:
        slot.link._follow(model, scaler)
    log.info("attached: %s, kernels: %s", plan.describe(), slot.link.stats()["backend"])
    return slot.link


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _names(model: DDP) -> dict[nn.Parameter, str]:
    """The parameters whose gradients DDP exchanges, in order."""
    if not isinstance(model, DDP):
        raise ConfigError(f"attach: expected a DistributedDataParallel, got {type(model).__name__}")
    for path, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"attach: {path or 'the model'} has sparse=True; use dense gradients")
    named = model.module.named_parameters()
    return {p: n for n, p in named if p.requires_grad and n not in model.parameters_to_ignore}


def _take_slot(model: DDP) -> Slot:
    if model not in _slots:
        occupant = model._get_ddp_logging_data().get("comm_hook")
        if model.mixed_precision is not None:
            occupant = "DDP's mixed_precision"
        if occupant:
            raise ConfigError(f"attach: the model's only hook slot is taken by {occupant}")
        slot = Slot(model)
        model.register_comm_hook(slot, _hook)
        _slots[model] = slot
        finalize(model, _orphans.append, slot).atexit = False
    if _slots[model].link is not None:
        raise ConfigError("attach: this model has a link already; switch or detach that one")
    return _slots[model]


def _bury(slot: Slot) -> None:
    """Ends what a model left behind that died without a detach."""
    if slot.link is not None:
        link, slot.link = slot.link, None
        link._close()


def _settings(plan: Plan, tensors: Mapping[str, Tensor], seed: int) -> dict[str, object]:
    """What must be equal on all ranks."""
    forms = {
        f"parameter {i}": f"{n} {tuple(t.shape)} {t.dtype}"
        for i, (n, t) in enumerate(tensors.items())
    }
    return {**plan.describe(), "seed": seed, "version": VERSION, **forms}
