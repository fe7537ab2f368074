"""Overlap of computation and communication: an event simulation of the threads of each rank.

Autograd fills the buckets. The communication thread encodes and decodes their messages in the order
of `comm/pipeline.py`, or one message after the other where the exchange is not pipelined. Started
collectives pass the wire one after the other. A worker with less than a core for each thread shares
its cores between them and with the CPU work of the collectives.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import inf
from statistics import fmean
from typing import NamedTuple

from gradwire.comm.cost_model import LinkModel, Network
from gradwire.comm.mirror import CollectiveRecord
from gradwire.comm.pipeline import MOST_UNDER_WAY
from gradwire.types import mix


class Stage:
    """A stage of a thread: ends when its CPU time is spent and its wall-clock time has passed.

    `work_s` is CPU time, which takes longer if cores are shared; `time_s` is wall-clock time.
    """

    def __init__(self, work_s: float, time_s: float = 0.0, *, in_advance: bool = False) -> None:
        self.work_s, self.time_s = work_s, time_s
        self.in_advance = in_advance
        """True if its thread may run it before earlier stages, while it waits for a bucket."""
        self.needs_bucket = False
        self.blocked_by = 0
        """The number of stages that must end before this one begins."""
        self._followers: list[Stage] = []

    def after(self, *stages: "Stage") -> None:
        """Lets the stage begin only when these have ended."""
        for stage in stages:
            stage._followers.append(self)
        self.blocked_by += len(stages)

    def pass_time(self, passed_s: float, speed: float) -> bool:
        """Returns whether the stage has ended."""
        self.work_s = _subtract(self.work_s, passed_s * speed)
        self.time_s = _subtract(self.time_s, passed_s)
        if self.work_s + self.time_s:
            return False
        for follower in self._followers:
            follower.blocked_by -= 1
        return True


class _Thread:
    """Runs stages in order, but decodes what has arrived while it waits for a bucket."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._left = deque(stages)
        self._current: Stage | None = None

    def current(self) -> Stage | None:
        """Returns the stage that runs, which no other interrupts; None if the thread waits."""
        if self._current is None:
            self._current = self._next()
        return self._current

    def has_ended(self) -> bool:
        return self._current is None and not self._left

    def advance(self, passed_s: float, speed: float) -> None:
        if self._current is not None and self._current.pass_time(passed_s, speed):
            self._current = None

    def _next(self) -> Stage | None:
        found = self._left[0] if self._left else None
        if found is not None and found.blocked_by:
            found = self._first_arrived() if found.needs_bucket else None
        if found is not None:
            self._left.remove(found)
        return found

    def _first_arrived(self) -> Stage | None:
        """Returns the first later stage that may run now."""
        later = islice(self._left, 1, None)
        return next((stage for stage in later if stage.in_advance and not stage.blocked_by), None)


class Threads(NamedTuple):
    """The stages of one rank: of its two threads, and of the wire that its collectives share."""

    computing: list[Stage]
    codec: list[Stage]
    wire: list[Stage]
    calls: list[tuple[Stage, Stage, Stage]]
    """The stage that starts each collective, its first stage on the wire, and its last."""


def run(ranks: Sequence[Threads], cores: float) -> float:
    """Returns when the last stage ends, if all ranks share their cores, `cores` per rank."""
    _synchronize(ranks)
    threads = [_Thread(stages) for rank in ranks for stages in rank[:3]]
    now_s = 0.0
    while not all(thread.has_ended() for thread in threads):
        active = [thread for thread in threads if thread.current() is not None]
        assert active, "all threads wait for each other"
        stages = [stage for thread in active if (stage := thread.current()) is not None]
        busy = sum(stage.work_s > 0 for stage in stages)
        speed = min(1.0, cores * len(ranks) / busy) if busy else 1.0
        passed_s = min(_next_s(stage, speed) for stage in stages)
        now_s += passed_s
        for thread in active:
            thread.advance(passed_s, speed)
    return now_s


def _synchronize(ranks: Sequence[Threads]) -> None:
    """Lets each collective begin only when all ranks have started it and ended the one before."""
    before: list[Stage] = []
    for calls in zip(*(rank.calls for rank in ranks), strict=True):
        starts = [start for start, _, _ in calls]
        for _, first, _ in calls:
            first.after(*starts, *before)
        before = [last for _, _, last in calls]


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
    """One message of a bucket: encode, call, decode, call ... decode.

    `codec_s[0]` is the time to encode, `codec_s[i]` to decode after call i. A call is one
    collective, or two if the lengths of messages are sent first, which the thread waits for.
    """

    ready_s: float
    """Computing time of the step until the message's last bucket is full."""
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
    pipelined: bool = True
    """Whether a message is encoded while others are on the wire (`comm/pipeline.py`)."""

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
        return cls(tasks, tail_s, template.pipelined)


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
    threads = Threads([], [], [], [])
    for work in works:
        _add_step(threads, work, network)
    return threads


def _add_step(threads: Threads, work: StepWork, network: Network) -> None:
    ends = [0.0, *(task.ready_s for task in work.tasks)]
    full = [Stage(end_s - begin_s) for begin_s, end_s in pairwise(ends)]
    # Begins when all buckets have returned.
    tail = Stage(work.tail_s)
    threads.computing.extend((*full, tail))
    arrived: dict[int, Stage] = {}
    for number, round_, is_start in _order(work):
        task = work.tasks[number]
        if is_start:
            arrived[number] = _add_call(threads, task.calls[round_], network)
            continue
        stage = Stage(task.codec_s[round_], in_advance=round_ > 0)
        stage.after(full[number] if round_ == 0 else arrived[number])
        stage.needs_bucket = round_ == 0
        threads.codec.append(stage)
        if round_ == len(task.calls):
            tail.after(stage)


class _Event(NamedTuple):
    """A message's round is encoded (after the one before it is decoded), or its call starts."""

    message: int
    round_: int
    is_start: bool


def _order(work: StepWork) -> Iterator[_Event]:
    """Yields what the communication thread does in a step, in order."""
    rounds = [len(task.calls) for task in work.tasks]
    if work.pipelined:
        yield from _pipeline_order(rounds)
        return
    for number, count in enumerate(rounds):
        for done in range(count):
            yield _Event(number, done, is_start=False)
            yield _Event(number, done, is_start=True)
        yield _Event(number, count, is_start=False)


def _pipeline_order(rounds: Sequence[int]) -> Iterator[_Event]:
    """Follows `comm/pipeline.py`, which knows the number of rounds from the step before."""
    started = [0] * len(rounds)
    encoded = [0] * len(rounds)

    def advance(number: int, starts: bool = True) -> Iterator[_Event]:
        if encoded[number] == started[number] <= rounds[number]:
            yield _Event(number, encoded[number], is_start=False)
            encoded[number] += 1
        if starts and started[number] < min(encoded[number], rounds[number]):
            yield _Event(number, started[number], is_start=True)
            started[number] += 1

    for added in range(len(rounds)):
        yield from advance(added)
        for number in reversed(range(added)):
            if started[number] < rounds[number]:
                yield from advance(number)
        if added >= MOST_UNDER_WAY:
            yield from advance(added - MOST_UNDER_WAY, starts=False)
    while any(done <= count for done, count in zip(encoded, rounds, strict=True)):
        earlier = [n for n in reversed(range(len(rounds))) if started[n] < rounds[n]]
        for number in earlier or range(len(rounds)):
            yield from advance(number)


def _add_call(threads: Threads, call: Sequence[CollectiveRecord], network: Network) -> Stage:
    """Adds the collectives of a call; returns the stage that ends when the last has arrived."""
    assert call, "a call has at least one collective"
    for number, record in enumerate(call):
        start = Stage(0.0)
        if number:
            # The lengths of the messages are waited for.
            start.after(threads.wire[-1])
        link = _link(record, network)
        # Hops wake the ranks one after the other; bytes are copied while others are on the wire.
        hops_s = link.hops_work_s(record.kind, record.size)
        busy_s = link.work_s(record.kind, record.nbytes, record.size)
        hops = Stage(hops_s)
        transfer = Stage(max(0.0, busy_s - hops_s), max(0.0, _call_s(record, network) - hops_s))
        threads.codec.append(start)
        threads.wire.extend((hops, transfer))
        threads.calls.append((start, hops, transfer))
    return threads.wire[-1]


def _call_s(record: CollectiveRecord, network: Network) -> float:
    return _link(record, network).call_s(record.kind, record.nbytes, record.size)


def _link(record: CollectiveRecord, network: Network) -> LinkModel:
    return network.link_for(record.kind, record.inside)
