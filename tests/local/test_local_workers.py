"""The background runner: starts at once, keeps the order, and reports errors."""

import time
from threading import Event

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Comm
from gradwire.comm.meter import Meter
from gradwire.errors import PeerError
from gradwire.local.workers import BackgroundRunner, ProcessGroupWorkers
from processes import Ranks


class Echo(Comm):
    """Answers with the buffers of the request."""

    def __init__(self) -> None:
        self.rank, self.size, self.meter = 0, 1, Meter()

    def run(self, call: Collective) -> list[Tensor]:
        return call.buffers


def recorded(received: list[int], number: int, gate: Event) -> CollectiveProgram[None]:
    assert gate.wait(10)
    [answer] = yield Collective("mean", [torch.tensor([number])])
    received.append(int(answer))


def test_start_returns_at_once() -> None:
    gate, received, runner = Event(), list[int](), BackgroundRunner(torch.device("cpu"))
    waits = [runner.start(recorded(received, number, gate), Echo()) for number in range(3)]
    assert not received
    gate.set()
    waits[1]()
    assert received[:2] == [0, 1]
    waits[2]()
    assert received == [0, 1, 2]
    waits[0]()
    runner.end(wait=True)


def test_an_error_is_raised_by_its_wait() -> None:
    def fails() -> CollectiveProgram[None]:
        raise PeerError("gone")
        yield

    received, gate, runner = list[int](), Event(), BackgroundRunner(torch.device("cpu"))
    gate.set()
    failed, next_one = (
        runner.start(fails(), Echo()),
        runner.start(recorded(received, 1, gate), Echo()),
    )
    with pytest.raises(PeerError, match="gone"):
        failed()
    next_one()
    assert received == [1]
    runner.end(wait=True)


def test_the_thread_count_is_inherited() -> None:
    seen: list[int] = []

    def counted() -> CollectiveProgram[None]:
        seen.append(torch.get_num_threads())
        return
        yield

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runner = BackgroundRunner(torch.device("cpu"))
        runner.start(counted(), Echo())()
        runner.end(wait=True)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def _finished_at_once(blocking: bool) -> bool:
    """Returns whether a program has finished when `start` returns."""
    received: list[int] = []
    workers = ProcessGroupWorkers(None, torch.device("cpu"))

    def slow() -> CollectiveProgram[None]:
        time.sleep(0.1)
        received.append(1)
        return
        yield

    wait = workers.start(slow(), blocking=blocking)
    finished = bool(received)
    wait()
    workers.shutdown(wait=True)
    assert received == [1]
    return finished


def test_a_blocking_start_waits(four_ranks: Ranks) -> None:
    assert four_ranks.run(_finished_at_once, True) == [True] * 4
    assert four_ranks.run(_finished_at_once, False) == [False] * 4
