"""The interface of a case: a way of averaging gradients, mounted on a model and its optimiser.

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
    """Which setting a controller chose from which step on, and why."""

    step: int
    setting: str
    reason: str


class Traffic(NamedTuple):
    """What one worker has sent since it mounted the case; seconds are None where nobody counts."""

    sent_bytes: float
    encode_s: float | None = None
    wire_s: float | None = None
    decode_s: float | None = None
    backend: str | None = None
    """The kernels that did it."""
    timeline: tuple[Change, ...] = ()
    """What a controller has decided so far."""


@dataclass(frozen=True)
class Mounted(ABC):
    """A case at work; `optimizer` takes the steps: the one that was given, or one around it."""

    optimizer: Optimizer
    period: int = field(default=1, kw_only=True)
    """Steps after which what a step does repeats; a mean counts over whole periods."""
    rest: int = field(default=0, kw_only=True)
    """After so many steps of a period nothing is under way."""
    averaged: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, kw_only=True)
    """While it is entered, on all workers, their models are the one that all of them train."""

    @abstractmethod
    def traffic(self, steps: int) -> Traffic:
        """What the `steps` taken so far have cost."""

    @abstractmethod
    def epoch_ended(self, learning_rate: float) -> None:
        """Hears of the end of an epoch, and of the learning rate of the next."""

    @abstractmethod
    def close(self) -> None: ...


class Case(ABC):
    """A way for the gradients of a DDP model to become their mean, or its workers to agree."""

    one_bucket: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    """Whether all workers train one model, so that it is worth a look."""

    @abstractmethod
    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted: ...
