"""When a step ends: buckets become full while autograd computes, and one courier carries them.

Two threads of one worker, followed from event to event. Autograd computes; the courier takes the
buckets in order, encodes, calls and decodes. Where a worker has less than a core for each of them
they share what it has, and the processor's part in a call takes its share as well.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from laconic.comm.ghost import Said
from laconic.network.model import Network


@dataclass(frozen=True)
class Errand:
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

    errands: tuple[Errand, ...]
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
            Errand(next(seconds), tuple(next(seconds) for _ in e.works_s), e.calls)
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


class _Stage:
    """Ends when its work is done and its time is up; begins when what it needs has ended."""

    def __init__(self, work_s: float, time_s: float, needs: int = 0) -> None:
        self.work_s, self.time_s, self.needs = work_s, time_s, needs


def predict(work: StepWork, network: Network, cores: float = inf) -> Forecast:
    """The step of a worker that has `cores` for itself."""
    errands = work.errands
    step_s = _run(_computing(work), _carrying(errands, network), cores)
    calls = [said for errand in errands for call in errand.calls for said in call]
    share = min(1.0, cores)
    compute_s = (errands[-1].ready_s if errands else 0.0) + work.rest_s
    return Forecast(
        step_s,
        compute_s / share,
        sum(errand.works_s[0] for errand in errands) / share,
        sum(_call_s(said, network) for said in calls),
        sum(sum(errand.works_s[1:]) for errand in errands) / share,
    )


def _computing(work: StepWork) -> list[_Stage]:
    """Up to each full bucket; then, when all are back, the rest."""
    full = [0.0, *(errand.ready_s for errand in work.errands)]
    stages = [_Stage(b - a, 0.0) for a, b in pairwise(full)]
    carried = sum(2 * len(errand.calls) + 1 for errand in work.errands)
    return [*stages, _Stage(work.rest_s, 0.0, needs=carried)]


def _carrying(errands: Sequence[Errand], network: Network) -> list[_Stage]:
    stages: list[_Stage] = []
    for number, errand in enumerate(errands, start=1):
        stages.append(_Stage(errand.works_s[0], 0.0, needs=number))
        for call, work_s in zip(errand.calls, errand.works_s[1:], strict=True):
            # As long as it takes on idle machines, and as its work takes on a busy one.
            busy_s = sum(_work_s(said, network) for said in call)
            stages.append(_Stage(busy_s, sum(_call_s(said, network) for said in call)))
            stages.append(_Stage(work_s, 0.0))
    return stages


def _run(computing: Sequence[_Stage], carrying: Sequence[_Stage], cores: float) -> float:
    """When the last stage ends; a stage waits for `needs` stages of the other thread."""
    threads = deque(computing), deque(carrying)
    now_s = 0.0
    while any(threads):
        done = len(computing) - len(threads[0]), len(carrying) - len(threads[1])
        active = [
            thread[0]
            for thread, other in zip(threads, reversed(done), strict=True)
            if thread and thread[0].needs <= other
        ]
        assert active, "both threads wait for each other"
        busy = sum(stage.work_s > 0 for stage in active)
        pace = min(1.0, cores / busy) if busy else 1.0
        passed_s = min(_next_s(stage, pace) for stage in active)
        now_s += passed_s
        for stage in active:
            stage.work_s = _less(stage.work_s, passed_s * pace)
            stage.time_s = _less(stage.time_s, passed_s)
        for thread in threads:
            if thread and thread[0] in active and not thread[0].work_s + thread[0].time_s:
                thread.popleft()
    return now_s


def _next_s(stage: _Stage, pace: float) -> float:
    """When something changes for a stage: its work is done, or its time is up."""
    times = [t for t in (stage.work_s / pace, stage.time_s) if t > 0]
    return min(times, default=0.0)


def _less(left_s: float, done_s: float) -> float:
    """What remains; rounding leaves no crumbs that would take another turn."""
    remains = left_s - done_s
    return remains if remains > 1e-12 else 0.0


def _call_s(said: Said, network: Network) -> float:
    return network.of(said.kind, said.inside).call_s(said.kind, said.nbytes, said.size)


def _work_s(said: Said, network: Network) -> float:
    return network.of(said.kind, said.inside).work_s(said.kind, said.nbytes, said.size)
