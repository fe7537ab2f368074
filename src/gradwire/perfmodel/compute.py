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
"""Computes the loss of a model at a step number."""

Update: TypeAlias = Callable[[], None]
"""Applies the gradients, as an optimiser's step does."""

# DDP has other buckets in the first step and rebuilds them in the second; later steps are alike.
_WARM_UP = 2
_TIME_LIMIT_S = 10.0
"""Measuring stops after this time, with one measured step at least."""


class Bucket(NamedTuple):
    """Gradients in one contiguous buffer, as DDP passes them to its hook."""

    names: list[str]
    gradients: list[Tensor]

    def copy(self) -> "Bucket":
        """Returns a copy with its own buffer."""
        flat = torch.cat([gradient.reshape(-1) for gradient in self.gradients])
        pieces = flat.split([gradient.numel() for gradient in self.gradients])
        pairs = zip(pieces, self.gradients, strict=True)
        return Bucket(self.names, [piece.view(like.shape) for piece, like in pairs])

    def to(self, device: str) -> "Bucket":
        return Bucket(self.names, [gradient.to(device) for gradient in self.gradients])


@dataclass(frozen=True)
class Compute:
    """Times of a step without its exchange, and the gradients of some steps."""

    forward_s: float
    ready_s: tuple[float, ...]
    """Time at which each bucket is full, from the start of the step."""
    tail_s: float
    """Time from the last bucket to the end: DDP returns the gradients, the optimiser steps."""
    steps: tuple[tuple[Bucket, ...], ...]
    """The buckets of several steps."""
    samples_s: tuple[tuple[float, ...], ...] = ()
    """Times `ready_s` and `tail_s` of every measured step."""

    @property
    def compute_s(self) -> float:
        return (self.ready_s[-1] if self.ready_s else 0.0) + self.tail_s


class _ObservedModel:
    """A DDP model with a single rank, whose hook records the buckets and their times."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[int] = []
        self.buckets: list[Bucket] = []
        self.names = {p: n for n, p in model.named_parameters()}
        self.ddp = DDP(model, process_group=group)
        self.ddp.register_comm_hook(self, _record_bucket)


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _record_bucket(state: _ObservedModel, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    state.marks.append(state.clock.mark())
    names = [state.names[p] for p in bucket.parameters()]
    state.buckets.append(Bucket(names, bucket.gradients()))
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def measure(model: nn.Module, loss: Loss, update: Update, steps: int = 3) -> Compute:
    """Takes some steps with a model, which they change, and returns the median times.

    Takes fewer steps if they are slow, but at least one.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameters to train")
    rows: list[list[float]] = []
    last_steps: list[tuple[Bucket, ...]] = []
    with single_rank_group() as group:
        clock = clock_of(trained[0].device)
        observed = _ObservedModel(model, group, clock)
        start_s = monotonic()
        for step in range(_WARM_UP + steps):
            marks, buckets = _step(observed, loss, update, step)
            if step >= _WARM_UP:
                rows.append([clock.seconds(marks[0], mark) for mark in marks[1:]])
                last_steps.append(buckets)
            if last_steps and monotonic() - start_s > _TIME_LIMIT_S:
                break
        del observed
    forward_s, *ready_s, end_s = (median(column) for column in zip(*rows, strict=True))
    samples_s = tuple((*full, end - full[-1]) for _, *full, end in rows)
    # Gradients of all steps would fill the memory; three suffice for residuals to grow.
    return Compute(
        forward_s, tuple(ready_s), end_s - ready_s[-1], tuple(last_steps[-3:]), samples_s
    )


def _step(
    observed: _ObservedModel, loss: Loss, update: Update, step: int
) -> tuple[list[int], tuple[Bucket, ...]]:
    """Returns marks (start, end of the forward pass, each bucket, end) and copied buckets."""
    observed.marks, observed.buckets = [], []
    clock = observed.clock
    start = clock.mark()
    observed.ddp.zero_grad()
    value = loss(observed.ddp, step)
    if not isinstance(value, Tensor):
        raise ConfigError(f"the loss must be a tensor of one number, got {value!r}")
    if value.numel() != 1:
        raise ConfigError(f"the loss must be one number, got a tensor of {list(value.shape)}")
    forward = clock.mark()
    value.backward()
    update()
    end = clock.mark()
    if step == 0:
        _check_gradients(observed.ddp.module, value)
    # Copied here, since in the hook it would count as the model's time.
    buckets = tuple(bucket.copy() for bucket in observed.buckets)
    return [start, forward, *observed.marks, end], buckets


def _check_gradients(model: nn.Module, value: Tensor) -> None:
    """Raises ConfigError if the loss is not finite or a parameter receives no gradient."""
    if not value.isfinite():
        raise ConfigError(f"the loss must be finite, got {value.item()}")
    params = model.named_parameters()
    if idle := [name for name, p in params if p.requires_grad and p.grad is None]:
        raise ConfigError(
            f"no gradient reaches {idle}; freeze them with requires_grad_(False), or let the loss "
            "use them"
        )


@contextmanager
def single_rank_group() -> Iterator[dist.ProcessGroup]:
    """Yields a group of this rank alone, whether or not other groups exist."""
    if dist.is_initialized():
        rank = dist.get_rank()
        yield dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()
