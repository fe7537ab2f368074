"""Settings of a local method in a case, and the facts that a clock needs about its messages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradwire.comm.cost_model import Kind
from gradwire.local.base import LocalMethod
from gradwire.local.workers import Group


class WorkerContext(NamedTuple):
    """The inputs of a local method on one worker: model, optimiser, process group and seed."""

    model: nn.Module
    optimizer: Optimizer
    group: Group
    seed: int


class SyncSchedule(NamedTuple):
    """A synchronisation starts every `interval` steps, and its mean is applied `delay` later."""

    interval: int
    delay: int = 0


@dataclass(frozen=True)
class LocalSettings(ABC):
    """The settings of a local method, which builds it with a compressor spec and an exchange."""

    sync_every: int

    @abstractmethod
    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod: ...

    @abstractmethod
    def sync_schedule(self) -> SyncSchedule: ...

    def optimiser(self, model: nn.Module, own: Optimizer) -> Optimizer:
        """Returns the optimiser of the local steps; by default the workload's own."""
        return own

    kind: ClassVar[Kind] = "mean"
    """The collective whose latency a call has."""
    messages: ClassVar[int] = 1
    """Messages about the whole model in a sync, which share a collective."""

    def senders(self, workers: int) -> int:
        """Returns the number of workers whose messages a worker decodes, its own included."""
        return workers
