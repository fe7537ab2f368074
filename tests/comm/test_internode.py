"""Calls between nodes: what the same call among so few ranks would answer, carried in shares."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Subgroup
from gradwire.comm.internode import relay
from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.errors import PeerError, WireError
from gradwire.types import InterNode

SHAPES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 5)]
"""Nodes, and ranks a node."""


def asked(call: Collective) -> CollectiveProgram[list[Tensor]]:
    return (yield call)


def letter(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def relayed(
    nodes: int, node: int, call_of: Callable[[int], Collective]
) -> tuple[list[list[Tensor]], list[Meter]]:
    """Each rank's answer where every rank of node i makes the call `call_of(i)`, and its meter."""
    network = Simulated(nodes * node)
    talks = [
        relay(call_of(rank // node), InterNode(node, nodes, rank % node))
        for rank in range(nodes * node)
    ]
    return network.run(talks), network.meters


def test_rings_are_rows_and_columns() -> None:
    assert Subgroup(3, across=False).groups(6) == [[0, 1, 2], [3, 4, 5]]
    assert Subgroup(3, across=True).groups(6) == [[0, 3], [1, 4], [2, 5]]


def test_a_ring_answers_its_own_ranks() -> None:
    network = Simulated(4)
    calls = [
        Collective("mean", [torch.tensor([float(r)])], ring=Subgroup(2, across=False))
        for r in range(4)
    ]
    answers = network.run([asked(call) for call in calls])
    assert [float(answer[0]) for answer in answers] == [0.5, 0.5, 2.5, 2.5]
    calls = [
        Collective("gather", [letter(r)], [1, 1], ring=Subgroup(2, across=True)) for r in range(4)
    ]
    answers = network.run([asked(call) for call in calls])
    assert [[int(b) for b in answer] for answer in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for meter in network.meters:
        assert (meter.calls, meter.sent_bytes, meter.inside_bytes) == (2, 4 + 1, 4)


def test_rings_may_differ_in_what_they_say_but_not_in_what_they_do() -> None:
    ring = Subgroup(2, across=False)
    calls = [Collective("mean", [torch.ones(1 + rank // 2)], ring=ring) for rank in range(4)]
    Simulated(4).run([asked(call) for call in calls])
    calls[3] = Collective("mean", [torch.ones(1)], ring=ring)
    with pytest.raises(PeerError, match="out of step"):
        Simulated(4).run([asked(call) for call in calls])
    calls[3] = Collective("mean", [torch.ones(2)], ring=Subgroup(2, across=True))
    with pytest.raises(PeerError, match="out of step"):
        Simulated(4).run([asked(call) for call in calls])


def kinds(nodes: int) -> dict[str, Callable[[int], Collective]]:
    """A call of every kind, by node; of odd lengths, and of none."""
    generator = torch.Generator().manual_seed(0)
    said = torch.randint(256, (nodes, nodes, 40), generator=generator).to(torch.uint8)
    floats = torch.randn(nodes, 17, generator=generator)
    lengths = [7 * ((n + 1) % 3) for n in range(nodes)]
    most = [99] * nodes

    def rows(by: int) -> list[Tensor]:
        return [said[by, to, : 3 * to] for to in range(nodes)]

    return {
        "mean": lambda n: Collective("mean", [floats[n].clone()]),
        "half mean": lambda n: Collective("mean", [floats[n].to(torch.float16)]),
        "gather": lambda n: Collective("gather", [said[n, 0, :13]], [13] * nodes),
        "uneven gather": lambda n: Collective("gather", [said[n, 0, : lengths[n]]], lengths),
        "told gather": lambda n: Collective("gather", [said[n, 0, : lengths[n]]], limits=most),
        "scatter": lambda n: Collective("scatter", rows(n), [3 * n] * nodes),
        "told scatter": lambda n: Collective("scatter", rows(n), limits=most),
        "broadcast": lambda n: Collective("broadcast", [said[n, 0, :11].clone()], root=nodes - 1),
    }


@pytest.mark.parametrize(("nodes", "node"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_answers_are_those_among_so_few_ranks(kind: str, nodes: int, node: int) -> None:
    expected = Simulated(nodes).run([asked(kinds(nodes)[kind](n)) for n in range(nodes)])
    answers, _ = relayed(nodes, node, kinds(nodes)[kind])
    for rank, answer in enumerate(answers):
        wanted = expected[rank // node]
        assert len(answer) == len(wanted)
        assert all(torch.equal(a, w) for a, w in zip(answer, wanted, strict=True))


@pytest.mark.parametrize(("nodes", "node"), SHAPES, ids=str)
def test_bytes_of_a_gather(nodes: int, node: int) -> None:
    """A share to every other node, then all that came to every rank of the node."""
    _, meters = relayed(
        nodes, node, lambda _: Collective("gather", [letter(*range(60))], [60] * nodes)
    )
    across, inside = (nodes - 1) * 60 // node, (node - 1) * nodes * 60 // node
    for meter in meters:
        assert meter.inside_bytes == inside
        assert meter.sent_bytes == meter.received_bytes == across + inside
        assert meter.calls == 2


def test_bytes_of_what_does_not_divide() -> None:
    """Thirteen bytes by three ranks: shares of five; eight bytes tell a length first."""
    _, meters = relayed(2, 3, lambda _: Collective("gather", [letter(*range(13))], limits=[99] * 2))
    for meter in meters:
        assert meter.sent_bytes - meter.inside_bytes == 8 + 5
        assert meter.inside_bytes == 2 * 2 * 5
        assert meter.calls == 3


def test_bytes_of_a_mean() -> None:
    """A ring for each place, with a share of 24 of the 48 bytes, then the shares inside."""
    _, meters = relayed(3, 2, lambda _: Collective("mean", [torch.ones(12)]))
    for meter in meters:
        assert meter.sent_bytes - meter.inside_bytes == 2 * 2 * 24 // 3
        assert meter.inside_bytes == 24


def test_a_node_that_announces_too_much_is_refused() -> None:
    with pytest.raises(WireError, match="rank 0 announces 13 bytes where 12 is the most"):
        relayed(2, 2, lambda _: Collective("gather", [letter(*range(13))], limits=[12] * 2))


def test_a_share_of_another_length_is_refused() -> None:
    talk = relay(Collective("gather", [letter(*range(8))], [8, 8]), InterNode(2, 2, 0))
    next(talk)
    with pytest.raises(WireError, match="share of 3 bytes where 4 were agreed"):
        talk.send([letter(1, 2, 3, 4), letter(1, 2, 3)])
