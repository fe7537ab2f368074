"""The interface of a case: a method of averaging gradients, mounted on a model and its optimiser.

A compressor is a hook of the model. A local method wraps the optimiser. A controller uses both.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer


@dataclass(frozen=True)
class Change:
    """A setting that a controller chose, the step from which it holds, and the reason."""

    step: int
    setting: str
    reason: str


class Traffic(NamedTuple):
    """Bytes and seconds of one worker since it mounted the case; None if not measured."""

    sent_bytes: float
    encode_s: float | None = None
    wire_s: float | None = None
    decode_s: float | None = None
    backend: str | None = None
    """The kernels in use."""
    timeline: tuple[Change, ...] = ()
    """The decisions of a controller so far."""
    received_bytes: float | None = None
    """None if as many as are sent."""


@dataclass(frozen=True)
class Mounted(ABC):
    """A mounted case; `optimizer` takes the steps: the original one, or a wrapper of it."""

    optimizer: Optimizer
    period: int = field(default=1, kw_only=True)
    """Steps after which the pattern of communication repeats; means are over whole periods."""
    idle_offset: int = field(default=0, kw_only=True)
    """Number of steps into a period after which no message is in flight."""
    in_backward: bool = field(default=True, kw_only=True)
    """True if buckets of gradients are sent during the backward pass."""
    clips: bool = field(default=True, kw_only=True)
    """True if the workload's limit of the norm holds for what the model's gradients are."""
    averaged: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, kw_only=True)
    """Context manager in which the models of all workers hold the average; entered on all."""

    @abstractmethod
    def traffic(self, steps: int) -> Traffic:
        """Returns the traffic of the `steps` taken so far."""

    @abstractmethod
    def epoch_ended(self, learning_rate: float) -> None:
        """Notifies the method that an epoch ended, with the learning rate of the next."""

    @abstractmethod
    def close(self) -> None: ...


class Case(ABC):
    """A method that averages the gradients or the parameters of a DDP model over workers."""

    one_bucket: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    """True if all workers train one common model, so that it can be evaluated."""

    @abstractmethod
    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted: ...
