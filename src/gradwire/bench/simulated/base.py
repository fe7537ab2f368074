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


class Trainee(ABC):
    """All workers of a run."""

    workload: Workload
    model: nn.Module
    """Worker 0's."""

    @property
    @abstractmethod
    def workers(self) -> int: ...

    @abstractmethod
    def step(self, step: int, steps: int) -> Tensor:
        """Takes step number `step` of `steps`; all losses, which the next one may write over."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """How good the model is that all workers have together."""

    @abstractmethod
    def meter(self) -> Meter:
        """What worker 0 has said."""

    @abstractmethod
    def timeline(self) -> tuple[Change, ...]:
        """What a controller has decided, if there is one."""


class Seen(NamedTuple):
    """Where a run stands after so many steps; bytes and calls are worker 0's since the start."""

    step: int
    evaluation: Evaluation
    sent_bytes: int
    calls: int
    losses: tuple[float, ...]
    """Of worker 0's batches since the last look."""
    lockstep_s: float = 0.0
    """What a step of all workers has taken in this process, the mean since the last look."""


def train(
    trainee: Trainee,
    steps: int,
    every: int,
    at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Seen]:
    """Trains, with a look at the start, every so many steps, and at the end.

    Only looks wait for the device. Each step and each look is taken in an `at_work` of its own.
    """
    losses: list[Tensor] = []
    start_s = time.perf_counter()
    for step in range(steps + 1):
        if step:
            with at_work():
                losses.append(trainee.step(step - 1, steps)[0].clone())
        if step % every == 0 or step == steps:
            with at_work():
                seen = _look(trainee, step, losses, start_s)
            losses.clear()
            yield seen
            start_s = time.perf_counter()


def _look(trainee: Trainee, step: int, losses: list[Tensor], start_s: float) -> Seen:
    own = torch.stack(losses).tolist() if losses else []
    lockstep_s = (time.perf_counter() - start_s) / max(1, len(own))
    evaluation, meter = trainee.evaluate(), trainee.meter()
    return Seen(step, evaluation, meter.sent_bytes, meter.calls, tuple(own), lockstep_s)
