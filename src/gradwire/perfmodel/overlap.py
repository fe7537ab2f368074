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
from gradwire.comm.mirror import Said
from gradwire.types import mix


class Stage:
    """Ends when its work is done and its time is up; begins when what it needs has ended."""

    def __init__(
        self, work_s: float, time_s: float = 0.0, needs: int = 0, meets: bool = False
    ) -> None:
        self.work_s, self.time_s = work_s, time_s
        self.needs = needs
        """So many stages of the rank's other thread."""
        self.meets = meets
        """Begins only when all ranks have come to it."""


class Threads(NamedTuple):
    """What one rank has to do."""

    computing: Iterable[Stage]
    carrying: Iterable[Stage]


class _Thread:
    def __init__(self, stages: Iterable[Stage]) -> None:
        self.left = deque(stages)
        self.done = 0

    def pass_time(self, passed_s: float, pace: float) -> None:
        stage = self.left[0]
        stage.work_s = _less(stage.work_s, passed_s * pace)
        stage.time_s = _less(stage.time_s, passed_s)
        if not stage.work_s + stage.time_s:
            self.left.popleft()
            self.done += 1


def run(ranks: Sequence[Threads], cores: float) -> float:
    """When the last stage ends, where ranks share what `cores` each of them brings."""
    pairs = [(_Thread(rank.computing), _Thread(rank.carrying)) for rank in ranks]
    now_s = 0.0
    while any(thread.left for pair in pairs for thread in pair):
        active = _active(pairs)
        assert active, "all threads wait for each other"
        busy = sum(thread.left[0].work_s > 0 for thread in active)
        pace = min(1.0, cores * len(ranks) / busy) if busy else 1.0
        passed_s = min(_next_s(thread.left[0], pace) for thread in active)
        now_s += passed_s
        for thread in active:
            thread.pass_time(passed_s, pace)
    return now_s


def _active(pairs: Sequence[tuple[_Thread, _Thread]]) -> list[_Thread]:
    """Those whose next stage can go on."""
    last = min(carrying.done for _, carrying in pairs)
    return [
        thread
        for pair in pairs
        for thread, other in zip(pair, reversed(pair), strict=True)
        if thread.left and thread.left[0].needs <= other.done
        if thread.done == last or not thread.left[0].meets
    ]


def _next_s(stage: Stage, pace: float) -> float:
    """When something changes for a stage: its work is done, or its time is up."""
    times = [t for t in (stage.work_s / pace, stage.time_s) if t > 0]
    return min(times, default=0.0)


def _less(left_s: float, done_s: float) -> float:
    """What remains; rounding leaves no crumbs that would take another turn."""
    remains = left_s - done_s
    return remains if remains > 1e-12 else 0.0


@dataclass(frozen=True)
class Task:
    """One bucket: work, a call, work, a call ... work. A call may be two, lengths first."""

    ready_s: float
    """How much has been computed in the step when the bucket is full."""
    works_s: tuple[float, ...]
    calls: tuple[tuple[Said, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.works_s) == len(self.calls) + 1


@dataclass(frozen=True)
class StepWork:
    """What one worker has to do in a step, in seconds of a core or a GPU of its own."""

    errands: tuple[Task, ...]
    rest_s: float
    """What is left when all buckets are back: gradients are handed over, the optimiser steps."""

    def numbers(self) -> list[float]:
        """All seconds, in an order that `of` knows."""
        return [self.rest_s, *(s for e in self.errands for s in (e.ready_s, *e.works_s))]

    @classmethod
    def of(cls, numbers: Sequence[float], like: "StepWork") -> "StepWork":
        """The same errands with other seconds."""
        rest_s, *others = numbers
        seconds = iter(others)
        errands = tuple(
            Task(next(seconds), tuple(next(seconds) for _ in e.works_s), e.calls)
            for e in like.errands
        )
        return cls(errands, rest_s)


class Forecast(NamedTuple):
    """A predicted step, and what its parts would take alone."""

    step_s: float
    compute_s: float
    encode_s: float
    wire_s: float
    decode_s: float


def predict(work: StepWork, network: Network, cores: float = inf) -> Forecast:
    """The step of a worker that has `cores` for itself, among others that do the same."""
    return predict_all([[work]], network, cores, steps=1)


STEPS = 24
"""Steps that ranks are followed for."""


def predict_all(
    ranks: Sequence[Sequence[StepWork]], network: Network, cores: float = inf, steps: int = STEPS
) -> Forecast:
    """The mean step of ranks on one machine, each with `cores`, that wait in calls for each other.

    Of each rank some of its steps are given, which vary; it takes them in an order of its own. So
    now one rank is late at a call and now another, and what one does not use others may.
    """
    taken = [
        [own[mix(step, rank) % len(own)] for step in range(steps)] for rank, own in enumerate(ranks)
    ]
    step_s = run([_threads(own, network) for own in taken], cores) / steps
    parts = [_parts(work, network, min(1.0, cores)) for own in ranks for work in own]
    return Forecast(step_s, *(fmean(column) for column in zip(*parts, strict=True)))


def _parts(work: StepWork, network: Network, share: float) -> tuple[float, float, float, float]:
    """Computing, encoding, calls and decoding."""
    errands = work.errands
    calls = [said for errand in errands for call in errand.calls for said in call]
    return (
        ((errands[-1].ready_s if errands else 0.0) + work.rest_s) / share,
        sum(errand.works_s[0] for errand in errands) / share,
        sum(_call_s(said, network) for said in calls),
        sum(sum(errand.works_s[1:]) for errand in errands) / share,
    )


def _threads(works: Sequence[StepWork], network: Network) -> Threads:
    """Some steps of one rank."""
    computing: list[Stage] = []
    carrying: list[Stage] = []
    for work in works:
        full = [0.0, *(errand.ready_s for errand in work.errands)]
        for errand, (begin_s, end_s) in zip(work.errands, pairwise(full), strict=True):
            computing.append(Stage(end_s - begin_s))
            carrying += _carried(errand, network, needs=len(computing))
        # When all buckets are back.
        computing.append(Stage(work.rest_s, needs=len(carrying)))
    return Threads(computing, carrying)


def _carried(errand: Task, network: Network, needs: int) -> Iterator[Stage]:
    yield Stage(errand.works_s[0], needs=needs)
    for call, work_s in zip(errand.calls, errand.works_s[1:], strict=True):
        # Ranks wake each other hop by hop; but bytes are copied while others are on the wire.
        hops_s = sum(_link(said, network).hops_work_s(said.kind, said.size) for said in call)
        busy_s = sum(
            _link(said, network).work_s(said.kind, said.nbytes, said.size) for said in call
        )
        whole_s = sum(_call_s(said, network) for said in call)
        yield Stage(hops_s, meets=True)
        yield Stage(max(0.0, busy_s - hops_s), max(0.0, whole_s - hops_s))
        yield Stage(work_s)


def _call_s(said: Said, network: Network) -> float:
    return _link(said, network).call_s(said.kind, said.nbytes, said.size)


def _link(said: Said, network: Network) -> LinkModel:
    return network.of(said.kind, said.inside)
