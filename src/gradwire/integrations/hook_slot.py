"""The slot of DDP's communication hook: one per model, registered late and never removed."""

from typing import Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError


class BucketReducer(Protocol):
    """A link that averages the buckets of a DDP model."""

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Starts the exchange of a bucket; the future completes when its buffer holds the mean."""

    def _owns(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is one of the link's model."""

    def _release(self) -> None:
        """Frees what the link holds, after its model died."""


class HookSlot:
    """DDP's only communication hook, which cannot be removed; but the link behind it can change.

    It is registered when a plan needs it: dense gradients are left to DDP's own reducer. A copied
    or unpickled DDP model has a reducer of its own without any hook. Its slot is empty.
    """

    def __init__(self, device: torch.device, dense_group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.dense_group = dense_group
        self.is_registered = False
        self.link: BucketReducer | None = None

    def check_free(self, model: DDP, requester: str) -> None:
        """Raises ConfigError if the model has another hook, so that `register` would fail."""
        if self.is_registered:
            return
        occupant = model._get_ddp_logging_data().get("comm_hook")
        if model.mixed_precision is not None:
            occupant = "DDP's mixed_precision"
        if occupant:
            raise ConfigError(f"{requester}: the model's only hook slot is taken by {occupant}")

    def register(self, model: DDP) -> None:
        """Registers the hook, if that was not done before."""
        if not self.is_registered:
            model.register_comm_hook(self, ddp_hook)
            self.is_registered = True

    def __reduce__(self) -> tuple[type["HookSlot"], tuple[torch.device]]:
        return HookSlot, (self.device,)


# Weak keys, so that this table does not keep models alive.
_slots: WeakKeyDictionary[DDP, HookSlot] = WeakKeyDictionary()

_orphans: list[HookSlot] = []
"""Slots whose model died attached. The garbage collector may hold any lock, so it only appends."""


# DDP compares these annotations by identity, so this file has no postponed annotations.
def ddp_hook(
    state: HookSlot,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """DDP calls this once a bucket, in the same order on every rank."""
    if isinstance(bucket, tuple):
        raise ConfigError(
            "compiled autograd's python_reducer hands over single gradients instead of buckets; "
            "set torch._dynamo.config.optimize_ddp = True"
        )
    if state.link is None:
        return allreduce_hook(state.dense_group, bucket)  # type: ignore[arg-type]
    if not state.link._owns(bucket.parameters()[0]):
        raise ConfigError(
            "comm_hook: this state belongs to another model, whose parameters it averages; make "
            "one for this model"
        )
    return state.link._reduce(bucket)


def take_slot(model: DDP) -> HookSlot:
    """Returns the model's slot; raises ConfigError if it has a link or another hook."""
    if model not in _slots:
        _slots[model] = HookSlot(next(model.parameters()).device, model.process_group)
        finalize(model, _orphans.append, _slots[model]).atexit = False
    slot = _slots[model]
    if slot.link is not None:
        raise ConfigError("attach: this model has a link already; switch or detach that one")
    slot.check_free(model, "attach")
    return slot


def release_orphans() -> None:
    """Releases the links of models that died attached."""
    while _orphans:
        link = _orphans.pop().link
        if link is not None:
            link._release()
