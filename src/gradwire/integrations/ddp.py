"""DistributedDataParallel: `attach` compresses the gradients of a DDP model."""

from time import perf_counter
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.base import Compressor, Memory
from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram, drive
from gradwire.comm.consistency import check_same
from gradwire.comm.groups import borrow, check_member
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.bucketing import PendingBucket, Ready
from gradwire.integrations.comm_runner import OnStream, OnThread
from gradwire.integrations.dense_allreduce import start_means
from gradwire.integrations.handle import Handle, Options, Wanted, at_end_of_backward
from gradwire.integrations.parameters import check_dense


class HookSlot:
    """DDP's only hook slot, which cannot be emptied again; but who answers in it can change."""

    def __init__(self, model: DDP) -> None:
        self.device = next(model.parameters()).device
        self.dense_group = model.process_group
        self.link: Link | None = None


# A hook stays for the life of its DDP, and this must not prolong it.
_slots: WeakKeyDictionary[DDP, HookSlot] = WeakKeyDictionary()

_orphans: list[HookSlot] = []
"""Slots whose model died attached. Who collects it may hold any lock, so it is only noted there."""


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _hook(state: HookSlot, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    if isinstance(bucket, tuple):
        raise ConfigError(
            "compiled autograd's python_reducer hands over single gradients instead of buckets; "
            "set torch._dynamo.config.optimize_ddp = True"
        )
    if state.link is None:
        return allreduce_hook(state.dense_group, bucket)
    return state.link._reduce(bucket)


class Link(Handle):
    """A DDP model whose gradients go through Gradwire, until `detach`."""

    has_slot = True
    overlaps = True

    def __init__(
        self,
        slot: HookSlot,
        group: dist.ProcessGroup,
        names: dict[nn.Parameter, str],
        wanted: Wanted,
        options: Options,
    ) -> None:
        self._slot = slot
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        # For us alone: what we send from a thread must not mix with what others send.
        self._loan = borrow(group, slot.device)
        try:
            Handle.__init__(self, self._loan.group, tensors, names, make_plan, wanted, options)
        except ConfigError:
            self._loan.give_back()
            raise
        self._settling = False
        self._computed_s = 0.0
        self._courier = (OnStream if self._comm.on_device else OnThread)(slot.device)
        self._hooks: list[RemovableHandle] = []

    def _close(self) -> None:
        self._slot.link = None
        for hook in self._hooks:
            hook.remove()
        self._courier.close()
        if self._courier.sound():
            self._loan.give_back()

    def _is_attached(self) -> bool:
        return self._slot.link is self

    def _follow(self, model: DDP, scaler: torch.amp.GradScaler) -> None:
        def read(*_: object) -> None:
            # Before the forward pass the GPU has little left to do, so asking it costs little.
            self.loss_scale_changed(scaler.get_scale())

        self._hooks.append(model.register_forward_pre_hook(read))

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if self._settling and bucket.index() == 0:
            self._settle_late()
        names = [self._parameters[p] for p in bucket.parameters()]
        future = self._courier.future()
        straight = self._is_straight()
        load = PendingBucket(names, bucket.gradients(), bucket.buffer(), future)
        nbytes = load.buffer.nbytes if straight else self._lanes.message_bytes(names)
        ready = self._buckets.add(load, nbytes, bucket.is_last())
        if ready is not None and straight:
            self._go_straight(ready, bucket.is_last())
        elif ready is not None:
            # Taken up here, since here the lanes are at rest between two steps.
            talks = [self._lanes.talk(*message) for message in ready.messages]
            self._courier.send(lambda: self._carry(talks), ready.loads)
        self._settle_after_backward(bucket.is_last())
        return future

    def _go_straight(self, ready: Ready, is_last: bool) -> None:
        for load in ready.loads:
            self._lanes.pass_by(load.names, load.buffer.nbytes)
        self._courier.begin(lambda: start_means(self._comm, ready), ready.loads)
        if is_last:
            # Now, since with a static graph DDP waits for them before any callback of ours.
            self._courier.arrive()

    def _carry(self, talks: list[CollectiveProgram[None]]) -> None:
        for talk in talks:
            drive(talk, self._comm)

    def _settle_after_backward(self, is_last: bool) -> None:
        """Sees to it that what goes wrong on the way is raised by `backward`, as what it is."""
        if torch._C._current_graph_task_id() == -1:
            # DDP's join calls the hook outside a backward pass.
            if is_last:
                self._computed_s = perf_counter()
                self._settle()
        elif not self._settling:
            self._settling = True
            # By way of a first callback, since DDP's own comes in between and must not be missed.
            at_end_of_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._computed_s = perf_counter()
        at_end_of_backward(self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._courier.settle(self._finish)
        self._comm.meter.waited_s += perf_counter() - self._computed_s
        self._end_step()

    def _settle_late(self) -> None:
        """Ends the pass before this one, whose callbacks never came: somebody else's has raised."""
        self._settling = False
        self._courier.settle(self._finish)
        self._lanes.settle(wait=False)

    def _finish(self) -> None:
        self._lanes.finish()
        if self._is_check_due():
            check_same(self._comm, self._lanes.tensors)


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
    controller: Controller | str | None = None,
    cuda_graphs: bool = True,
    least_bytes: int | None = None,
) -> Link:
    """Compresses the gradients of a DDP model from the next backward pass on.

    Called on all ranks of the model's group, which check that they agree. Memory None means the
    residual where the method needs it; exchange "auto" means the cheapest that can carry it. A
    `scaler` is asked for its loss scale before every forward pass, and residuals follow it. Every
    `check_every` backward passes ranks compare their parameters, unless it is 0. With `checksum` a
    CRC goes behind every message that is not summed up on the way. A `controller` changes settings
    of the compressor while it trains ("autopilot", "gravac", "accordion" or "schedule", with their
    settings). On a GPU the work of a bucket becomes CUDA graphs after some steps, where it is the
    same at every step (`recorded.py`); `cuda_graphs=False` launches it kernel by kernel. Buckets
    with less than `least_bytes` to say go out together with the next; None means a million where a
    GPU's messages go through the host, which waits for the card at each of them, and 0 elsewhere.
    """
    while _orphans:
        _bury(_orphans.pop())
    check_whole("attach", "check_every", check_every, 0)
    names = _names(model)
    group = model.process_group if process_group is None else process_group
    check_member(group)
    if least_bytes is not None:
        check_whole("attach", "least_bytes", least_bytes, 0)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ConfigError(f"attach: scaler must be a GradScaler, with get_scale(), got {scaler!r}")
    rule = find_controller(controller)
    wanted = Wanted(compressor, memory, exchange)
    # Refused before the slot is taken, which cannot be undone.
    make_plan(*wanted, names, group.size())
    slot = _take_slot(model)
    options = Options(seed, nan_policy, check_every, checksum, rule, cuda_graphs, least_bytes)
    slot.link = Link(slot, group, names, wanted, options)
    if scaler is not None:
        slot.link._follow(model, scaler)
    return slot.link


def _names(model: DDP) -> dict[nn.Parameter, str]:
    """The parameters whose gradients DDP exchanges, in order."""
    if not isinstance(model, DDP):
        raise ConfigError(f"attach: expected a DistributedDataParallel, got {type(model).__name__}")
    check_dense(model.module)
    named = model.module.named_parameters()
    return {p: n for n, p in named if p.requires_grad and n not in model.parameters_to_ignore}


def _take_slot(model: DDP) -> HookSlot:
    if model not in _slots:
        occupant = model._get_ddp_logging_data().get("comm_hook")
        if model.mixed_precision is not None:
            occupant = "DDP's mixed_precision"
        if occupant:
            raise ConfigError(f"attach: the model's only hook slot is taken by {occupant}")
        slot = HookSlot(model)
        model.register_comm_hook(slot, _hook)
        _slots[model] = slot
        finalize(model, _orphans.append, slot).atexit = False
    if _slots[model].link is not None:
        raise ConfigError("attach: this model has a link already; switch or detach that one")
    return _slots[model]


def _bury(slot: HookSlot) -> None:
    """Ends what a model left behind that died without a detach."""
    if slot.link is not None:
        slot.link._leave()
