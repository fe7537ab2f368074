"""Measures forward, backward and optimizer time of a model, and when each DDP bucket is ready."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError
from gradwire.perfmodel.timers import Clock, clock_of

Loss: TypeAlias = Callable[[nn.Module, int], Tensor]
"""The loss of a model in step number so and so."""

Update: TypeAlias = Callable[[], None]
"""What an optimiser does with the gradients that are there."""

# The first has other buckets, the second finds new ones; then it is as it will be.
_WARM_UP = 2
_ENOUGH_S = 10.0
"""After this long one step that was measured is enough: nobody waits a minute for two more."""


class Bucket(NamedTuple):
    """Gradients that lie side by side in one buffer, as DDP hands them over."""

    names: list[str]
    gradients: list[Tensor]

    def copy(self) -> "Bucket":
        """The same in a buffer of its own."""
        flat = torch.cat([gradient.reshape(-1) for gradient in self.gradients])
        pieces = flat.split([gradient.numel() for gradient in self.gradients])
        pairs = zip(pieces, self.gradients, strict=True)
        return Bucket(self.names, [piece.view(like.shape) for piece, like in pairs])

    def to(self, device: str) -> "Bucket":
        return Bucket(self.names, [gradient.to(device) for gradient in self.gradients])


@dataclass(frozen=True)
class Compute:
    """A step without its exchange, and the gradients of some steps for others to try on."""

    forward_s: float
    ready_s: tuple[float, ...]
    """When each bucket is full, from the start of the step."""
    rest_s: float
    """From the last bucket to the end: gradients are handed over, the optimiser steps."""
    steps: tuple[tuple[Bucket, ...], ...]
    """The buckets of several steps."""
    samples_s: tuple[tuple[float, ...], ...] = ()
    """When each bucket was full and how long the rest took, of every step that was measured."""

    @property
    def compute_s(self) -> float:
        return (self.ready_s[-1] if self.ready_s else 0.0) + self.rest_s


class _Watched:
    """A DDP model in a world of one, whose hook only takes notes."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[int] = []
        self.buckets: list[Bucket] = []
        self.names = {p: n for n, p in model.named_parameters()}
        self.ddp = DDP(model, process_group=group)
        self.ddp.register_comm_hook(self, _note)


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _note(state: _Watched, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    state.marks.append(state.clock.mark())
    names = [state.names[p] for p in bucket.parameters()]
    state.buckets.append(Bucket(names, bucket.gradients()))
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def measure(model: nn.Module, loss: Loss, update: Update, steps: int = 3) -> Compute:
    """Takes some steps with a model, which it changes, and returns the medians.

    Fewer where they take long, but one at least.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameters to train")
    rows: list[list[float]] = []
    kept: list[tuple[Bucket, ...]] = []
    with alone() as group:
        clock = clock_of(trained[0].device)
        watched = _Watched(model, group, clock)
        start_s = monotonic()
        for step in range(_WARM_UP + steps):
            marks, buckets = _step(watched, loss, update, step)
            if step >= _WARM_UP:
                rows.append([clock.seconds(marks[0], mark) for mark in marks[1:]])
                kept.append(buckets)
            if kept and monotonic() - start_s > _ENOUGH_S:
                break
        del watched
    forward_s, *ready_s, end_s = (median(column) for column in zip(*rows, strict=True))
    samples_s = tuple((*full, end - full[-1]) for _, *full, end in rows)
    # Gradients of every step would fill the memory; three show how residuals grow.
    return Compute(forward_s, tuple(ready_s), end_s - ready_s[-1], tuple(kept[-3:]), samples_s)


def _step(
    watched: _Watched, loss: Loss, update: Update, step: int
) -> tuple[list[int], tuple[Bucket, ...]]:
    """Marks: start, end of the forward pass, each bucket, end; and the buckets, copied."""
    watched.marks, watched.buckets = [], []
    clock = watched.clock
    start = clock.mark()
    watched.ddp.zero_grad()
    value = loss(watched.ddp, step)
    if not isinstance(value, Tensor):
        raise ConfigError(f"the loss must be a tensor of one number, got {value!r}")
    if value.numel() != 1:
        raise ConfigError(f"the loss must be one number, got a tensor of {list(value.shape)}")
    forward = clock.mark()
    value.backward()
    update()
    end = clock.mark()
    if step == 0:
        _check_gradients(watched.ddp.module, value)
    # Here and not in the hook, where it would take time that is not the model's.
    buckets = tuple(bucket.copy() for bucket in watched.buckets)
    return [start, forward, *watched.marks, end], buckets


def _check_gradients(model: nn.Module, value: Tensor) -> None:
    """Raises where steps are not those of a training that goes on."""
    if not value.isfinite():
        raise ConfigError(f"the loss must be finite, got {value.item()}")
    params = model.named_parameters()
    if idle := [name for name, p in params if p.requires_grad and p.grad is None]:
        raise ConfigError(
            f"no gradient reaches {idle}; freeze them with requires_grad_(False), or let the loss "
            "use them"
        )


@contextmanager
def alone() -> Iterator[dist.ProcessGroup]:
    """A group with no other member, whether or not there are other groups."""
    if dist.is_initialized():
        rank = dist.get_rank()
        yield dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()
