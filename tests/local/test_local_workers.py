"""What goes on beside a worker: begun at once, held in order, and what goes wrong is told."""

import time
from threading import Event

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Comm
from gradwire.comm.meter import Meter
from gradwire.errors import PeerError
from gradwire.local.workers import Beside, GroupPeers
from processes import Ranks


class Echo(Comm):
    """Answers with what was said."""

    def __init__(self) -> None:
        self.rank, self.size, self.meter = 0, 1, Meter()

    def answer(self, call: Collective) -> list[Tensor]:
        return call.buffers


def noted(heard: list[int], number: int, gate: Event) -> CollectiveProgram[None]:
    assert gate.wait(10)
    [told] = yield Collective("mean", [torch.tensor([number])])
    heard.append(int(told))


def test_who_starts_a_conversation_goes_on_at_once() -> None:
    gate, heard, beside = Event(), list[int](), Beside(torch.device("cpu"))
    syncs_host = [beside.start(noted(heard, number, gate), Echo()) for number in range(3)]
    assert not heard
    gate.set()
    syncs_host[1]()
    assert heard[:2] == [0, 1]
    syncs_host[2]()
    assert heard == [0, 1, 2]
    syncs_host[0]()
    beside.end(wait=True)


def test_what_goes_wrong_is_raised_where_it_is_awaited() -> None:
    def fails() -> CollectiveProgram[None]:
        raise PeerError("gone")
        yield

    heard, gate, beside = list[int](), Event(), Beside(torch.device("cpu"))
    gate.set()
    lost, next_one = beside.start(fails(), Echo()), beside.start(noted(heard, 1, gate), Echo())
    with pytest.raises(PeerError, match="gone"):
        lost()
    next_one()
    assert heard == [1]
    beside.end(wait=True)


def test_it_keeps_to_as_many_threads() -> None:
    seen: list[int] = []

    def counted() -> CollectiveProgram[None]:
        seen.append(torch.get_num_threads())
        return
        yield

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        beside = Beside(torch.device("cpu"))
        beside.start(counted(), Echo())()
        beside.end(wait=True)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def _peaceful(in_peace: bool) -> bool:
    """Whether a conversation is over as soon as it is started."""
    heard: list[int] = []
    peers = GroupPeers(None, torch.device("cpu"))

    def slow() -> CollectiveProgram[None]:
        time.sleep(0.1)
        heard.append(1)
        return
        yield

    wait = peers.start(slow(), in_peace=in_peace)
    over = bool(heard)
    wait()
    peers.rest(wait=True)
    assert heard == [1]
    return over


def test_what_needs_peace_is_waited_for(four_ranks: Ranks) -> None:
    assert four_ranks.run(_peaceful, True) == [True] * 4
    assert four_ranks.run(_peaceful, False) == [False] * 4
