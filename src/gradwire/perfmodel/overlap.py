"""Overlap of computation and communication: an event simulation of the two threads of each rank.

Autograd fills the buckets; the communication thread takes them in order, encodes, runs collectives
and decodes. A worker with less than a core for each thread shares its cores between them and with
the CPU work of the collectives.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import NamedTuple

from gradwire.comm.cost_model import LinkModel, Network
from gradwire.comm.mirror import CollectiveRecord
from gradwire.types import mix


class Stage:
    """A stage of a thread: ends when its CPU time is spent and its wall-clock time has passed.

    `work_s` is CPU time, which takes longer if cores are shared; `time_s` is wall-clock time.
    """

    def __init__(
        self, work_s: float, time_s: float = 0.0, needs: int = 0, synchronizes: bool = False
    ) -> None:
        self.work_s, self.time_s = work_s, time_s
        self.needs = needs
        """Stages of the rank's other thread that must have ended before this one begins."""
        self.synchronizes = synchronizes
        """True if the stage begins only when all ranks have reached it."""


class Threads(NamedTuple):
    """The stages of the two threads of one rank."""

    computing: Iterable[Stage]
    communicating: Iterable[Stage]


class _Thread:
    def __init__(self, stages: Iterable[Stage]) -> None:
        self.left = deque(stages)
        self.done = 0

    def advance(self, passed_s: float, speed: float) -> None:
        stage = self.left[0]
        stage.work_s = _subtract(stage.work_s, passed_s * speed)
        stage.time_s = _subtract(stage.time_s, passed_s)
        if not stage.work_s + stage.time_s:
            self.left.popleft()
            self.done += 1


def run(ranks: Sequence[Threads], cores: float) -> float:
    """Returns when the last stage ends, if all ranks share their cores, `cores` per rank."""
    pairs = [(_Thread(rank.computing), _Thread(rank.communicating)) for rank in ranks]
    now_s = 0.0
    while any(thread.left for pair in pairs for thread in pair):
        active = _active(pairs)
        assert active, "all threads wait for each other"
        busy = sum(thread.left[0].work_s > 0 for thread in active)
        speed = min(1.0, cores * len(ranks) / busy) if busy else 1.0
        passed_s = min(_next_s(thread.left[0], speed) for thread in active)
        now_s += passed_s
        for thread in active:
            thread.advance(passed_s, speed)
    return now_s


def _active(pairs: Sequence[tuple[_Thread, _Thread]]) -> list[_Thread]:
    """Returns the threads whose next stage can run."""
    last = min(communicating.done for _, communicating in pairs)
    return [
        thread
        for pair in pairs
        for thread, other in zip(pair, reversed(pair), strict=True)
        if thread.left and thread.left[0].needs <= other.done
        if thread.done == last or not thread.left[0].synchronizes
    ]


def _next_s(stage: Stage, speed: float) -> float:
    """Returns the time until the stage's work is done or its time has passed."""
    times = [t for t in (stage.work_s / speed, stage.time_s) if t > 0]
    return min(times, default=0.0)


def _subtract(left_s: float, done_s: float) -> float:
    """Subtracts; a difference within rounding errors becomes zero."""
    remains = left_s - done_s
    return remains if remains > 1e-12 else 0.0


@dataclass(frozen=True)
class Task:
    """One bucket: encode, call, decode, call ... decode.

    `codec_s[0]` is the time to encode, `codec_s[i]` to decode after call i. A call is one
    collective, or two if the lengths of messages are sent first.
    """

    ready_s: float
    """Computing time of the step until the bucket is full."""
    codec_s: tuple[float, ...]
    calls: tuple[tuple[CollectiveRecord, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.codec_s) == len(self.calls) + 1


@dataclass(frozen=True)
class StepWork:
    """The work of one worker in a step, in seconds of a core or a GPU of its own."""

    tasks: tuple[Task, ...]
    tail_s: float
    """Work after the last bucket has returned: DDP copies gradients, the optimiser steps."""

    def to_list(self) -> list[float]:
        """Returns all times, in the order that `from_list` expects."""
        return [self.tail_s, *(s for task in self.tasks for s in (task.ready_s, *task.codec_s))]

    @classmethod
    def from_list(cls, times_s: Sequence[float], template: "StepWork") -> "StepWork":
        """Returns the tasks of `template` with other times."""
        tail_s, *others = times_s
        seconds = iter(others)
        tasks = tuple(
            Task(next(seconds), tuple(next(seconds) for _ in task.codec_s), task.calls)
            for task in template.tasks
        )
        return cls(tasks, tail_s)


class StepTimes(NamedTuple):
    """Predicted times of a step, and of its parts without overlap."""

    step_s: float
    compute_s: float
    encode_s: float
    wire_s: float
    decode_s: float


def predict_step(work: StepWork, network: Network, cores: float = inf) -> StepTimes:
    """Predicts the step of a worker that has `cores` cores, if all workers have equal work."""
    return predict_ranks([[work]], network, cores, steps=1)


STEPS = 24
"""Steps that are simulated."""


def predict_ranks(
    ranks: Sequence[Sequence[StepWork]], network: Network, cores: float = inf, steps: int = STEPS
) -> StepTimes:
    """Predicts the mean step of ranks on one machine, `cores` each, that wait for each other.

    For each rank some measured steps are given, which vary; every rank takes them in its own random
    order. So different ranks are late at different calls, and use the cores that others leave idle.
    """
    taken = [
        [own[mix(step, rank) % len(own)] for step in range(steps)] for rank, own in enumerate(ranks)
    ]
    step_s = run([_threads(own, network) for own in taken], cores) / steps
    parts = [_part_times(work, network, min(1.0, cores)) for own in ranks for work in own]
    return StepTimes(step_s, *(fmean(column) for column in zip(*parts, strict=True)))


def _part_times(
    work: StepWork, network: Network, share: float
) -> tuple[float, float, float, float]:
    """Returns the times of computing, encoding, calls and decoding."""
    tasks = work.tasks
    calls = [record for task in tasks for call in task.calls for record in call]
    return (
        ((tasks[-1].ready_s if tasks else 0.0) + work.tail_s) / share,
        sum(task.codec_s[0] for task in tasks) / share,
        sum(_call_s(record, network) for record in calls),
        sum(sum(task.codec_s[1:]) for task in tasks) / share,
    )


def _threads(works: Sequence[StepWork], network: Network) -> Threads:
    """Returns the stages of some steps of one rank."""
    computing: list[Stage] = []
    communicating: list[Stage] = []
    for work in works:
        full = [0.0, *(task.ready_s for task in work.tasks)]
        for task, (begin_s, end_s) in zip(work.tasks, pairwise(full), strict=True):
            computing.append(Stage(end_s - begin_s))
            communicating += _communication(task, network, needs=len(computing))
        # Begins when all buckets have returned.
        computing.append(Stage(work.tail_s, needs=len(communicating)))
    return Threads(computing, communicating)


def _communication(task: Task, network: Network, needs: int) -> Iterator[Stage]:
    yield Stage(task.codec_s[0], needs=needs)
    for call, work_s in zip(task.calls, task.codec_s[1:], strict=True):
        # Hops wake the ranks one after the other; bytes are copied while others are on the wire.
        hops_s = sum(
            _link(record, network).hops_work_s(record.kind, record.size) for record in call
        )
        busy_s = sum(
            _link(record, network).work_s(record.kind, record.nbytes, record.size)
            for record in call
        )
        whole_s = sum(_call_s(record, network) for record in call)
        yield Stage(hops_s, synchronizes=True)
        yield Stage(max(0.0, busy_s - hops_s), max(0.0, whole_s - hops_s))
        yield Stage(work_s)


def _call_s(record: CollectiveRecord, network: Network) -> float:
    return _link(record, network).call_s(record.kind, record.nbytes, record.size)


def _link(record: CollectiveRecord, network: Network) -> LinkModel:
    return network.link_for(record.kind, record.inside)
