"""The interface of simulated training, its loop, and what an evaluation records."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.bench.case import Change
from gradwire.bench.workloads.base import Evaluation, Workload
from gradwire.comm.meter import Meter


class SimulatedTrainer(ABC):
    """Trains all workers of a run in one process."""

    workload: Workload
    model: nn.Module
    """The model of worker 0."""

    @property
    @abstractmethod
    def workers(self) -> int: ...

    @abstractmethod
    def step(self, step: int, steps: int) -> Tensor:
        """Takes step number `step` of `steps`; returns all losses, which the next overwrites."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluates the common model of all workers."""

    @abstractmethod
    def meter(self) -> Meter:
        """Returns the meter of worker 0."""

    @abstractmethod
    def timeline(self) -> tuple[Change, ...]:
        """Returns the decisions of the controller; empty without one."""


class Snapshot(NamedTuple):
    """The state of a run after `step` steps; bytes and calls are worker 0's since the start."""

    step: int
    evaluation: Evaluation
    sent_bytes: int
    calls: int
    losses: tuple[float, ...]
    """Losses of worker 0's batches since the last snapshot."""
    lockstep_s: float = 0.0
    """Mean time of a step of all workers in this process since the last snapshot."""


def train(
    trainer: SimulatedTrainer,
    steps: int,
    evaluate_every: int,
    device_context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Snapshot]:
    """Trains; yields snapshots at the start, every `evaluate_every` steps, and at the end.

    Only snapshots wait for the device. Each step and each snapshot enters a `device_context`.
    """
    losses: list[Tensor] = []
    start_s = time.perf_counter()
    for step in range(steps + 1):
        if step:
            with device_context():
                losses.append(trainer.step(step - 1, steps)[0].clone())
        if step % evaluate_every == 0 or step == steps:
            with device_context():
                snapshot = _snapshot(trainer, step, losses, start_s)
            losses.clear()
            yield snapshot
            start_s = time.perf_counter()


def _snapshot(
    trainer: SimulatedTrainer, step: int, losses: list[Tensor], start_s: float
) -> Snapshot:
    values = torch.stack(losses).tolist() if losses else []
    lockstep_s = (time.perf_counter() - start_s) / max(1, len(values))
    evaluation, meter = trainer.evaluate(), trainer.meter()
    return Snapshot(step, evaluation, meter.sent_bytes, meter.calls, tuple(values), lockstep_s)
