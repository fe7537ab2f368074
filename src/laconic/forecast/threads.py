"""Two threads of each rank, followed from event to event: one computes, one carries."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


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
