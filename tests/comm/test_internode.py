"""Collectives between nodes return what the same collective among one rank per node returns."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Subgroup
from gradwire.comm.internode import internode_collective
from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.errors import PeerError, WireError
from gradwire.types import InterNode

SHAPES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 5)]
"""Nodes, and ranks per node."""


def run_one(call: Collective) -> CollectiveProgram[list[Tensor]]:
    return (yield call)


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def run_internode(
    nodes: int, node: int, call_of: Callable[[int], Collective]
) -> tuple[list[list[Tensor]], list[Meter]]:
    """Returns each rank's result, where every rank of node i runs `call_of(i)`, and its meter."""
    network = Simulated(nodes * node)
    programs = [
        internode_collective(call_of(rank // node), InterNode(node, nodes, rank % node))
        for rank in range(nodes * node)
    ]
    return network.run(programs), network.meters


def test_subgroups_are_rows_and_columns() -> None:
    assert Subgroup(3, internode=False).groups(6) == [[0, 1, 2], [3, 4, 5]]
    assert Subgroup(3, internode=True).groups(6) == [[0, 3], [1, 4], [2, 5]]


def test_a_subgroup_exchanges_among_its_own_ranks() -> None:
    network = Simulated(4)
    calls = [
        Collective("mean", [torch.tensor([float(r)])], subgroup=Subgroup(2, internode=False))
        for r in range(4)
    ]
    answers = network.run([run_one(call) for call in calls])
    assert [float(answer[0]) for answer in answers] == [0.5, 0.5, 2.5, 2.5]
    calls = [
        Collective("gather", [message(r)], [1, 1], subgroup=Subgroup(2, internode=True))
        for r in range(4)
    ]
    answers = network.run([run_one(call) for call in calls])
    assert [[int(b) for b in answer] for answer in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for meter in network.meters:
        assert (meter.calls, meter.sent_bytes, meter.inside_bytes) == (2, 4 + 1, 4)


def test_subgroups_may_differ_in_length_but_not_in_kind() -> None:
    subgroup = Subgroup(2, internode=False)
    calls = [
        Collective("mean", [torch.ones(1 + rank // 2)], subgroup=subgroup) for rank in range(4)
    ]
    Simulated(4).run([run_one(call) for call in calls])
    calls[3] = Collective("mean", [torch.ones(1)], subgroup=subgroup)
    with pytest.raises(PeerError, match="out of step"):
        Simulated(4).run([run_one(call) for call in calls])
    calls[3] = Collective("mean", [torch.ones(2)], subgroup=Subgroup(2, internode=True))
    with pytest.raises(PeerError, match="out of step"):
        Simulated(4).run([run_one(call) for call in calls])


def kinds(nodes: int) -> dict[str, Callable[[int], Collective]]:
    """Returns a function of the node for every kind of collective; odd and zero lengths too."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (nodes, nodes, 40), generator=generator).to(torch.uint8)
    floats = torch.randn(nodes, 17, generator=generator)
    lengths = [7 * ((n + 1) % 3) for n in range(nodes)]
    most = [99] * nodes

    def rows(by: int) -> list[Tensor]:
        return [data[by, to, : 3 * to] for to in range(nodes)]

    return {
        "mean": lambda n: Collective("mean", [floats[n].clone()]),
        "half mean": lambda n: Collective("mean", [floats[n].to(torch.float16)]),
        "gather": lambda n: Collective("gather", [data[n, 0, :13]], [13] * nodes),
        "uneven gather": lambda n: Collective("gather", [data[n, 0, : lengths[n]]], lengths),
        "gather of unknown sizes": lambda n: Collective(
            "gather", [data[n, 0, : lengths[n]]], limits=most
        ),
        "all_to_all": lambda n: Collective("all_to_all", rows(n), [3 * n] * nodes),
        "all_to_all of unknown sizes": lambda n: Collective("all_to_all", rows(n), limits=most),
        "broadcast": lambda n: Collective("broadcast", [data[n, 0, :11].clone()], root=nodes - 1),
    }


@pytest.mark.parametrize(("nodes", "node"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_results_equal_those_of_one_rank_per_node(kind: str, nodes: int, node: int) -> None:
    expected = Simulated(nodes).run([run_one(kinds(nodes)[kind](n)) for n in range(nodes)])
    answers, _ = run_internode(nodes, node, kinds(nodes)[kind])
    for rank, answer in enumerate(answers):
        wanted = expected[rank // node]
        assert len(answer) == len(wanted)
        assert all(torch.equal(a, w) for a, w in zip(answer, wanted, strict=True))


@pytest.mark.parametrize(("nodes", "node"), SHAPES, ids=str)
def test_bytes_of_a_gather(nodes: int, node: int) -> None:
    """Each rank sends a share to every other node, then all it received inside the node."""
    _, meters = run_internode(
        nodes, node, lambda _: Collective("gather", [message(*range(60))], [60] * nodes)
    )
    between, inside = (nodes - 1) * 60 // node, (node - 1) * nodes * 60 // node
    for meter in meters:
        assert meter.inside_bytes == inside
        assert meter.sent_bytes == meter.received_bytes == between + inside
        assert meter.calls == 2


def test_bytes_of_uneven_shares() -> None:
    """Thirteen bytes make three shares of five; eight bytes announce the length first."""
    _, meters = run_internode(
        2, 3, lambda _: Collective("gather", [message(*range(13))], limits=[99] * 2)
    )
    for meter in meters:
        assert meter.sent_bytes - meter.inside_bytes == 8 + 5
        assert meter.inside_bytes == 2 * 2 * 5
        assert meter.calls == 3


def test_bytes_of_a_mean() -> None:
    """Each rank's ring between nodes holds 24 of the 48 bytes; shares are then gathered inside."""
    _, meters = run_internode(3, 2, lambda _: Collective("mean", [torch.ones(12)]))
    for meter in meters:
        assert meter.sent_bytes - meter.inside_bytes == 2 * 2 * 24 // 3
        assert meter.inside_bytes == 24


def test_a_node_that_announces_too_much_is_refused() -> None:
    with pytest.raises(WireError, match="rank 0 announces 13 bytes where 12 is the most"):
        run_internode(2, 2, lambda _: Collective("gather", [message(*range(13))], limits=[12] * 2))


def test_a_share_of_another_length_is_refused() -> None:
    program = internode_collective(
        Collective("gather", [message(*range(8))], [8, 8]), InterNode(2, 2, 0)
    )
    next(program)
    with pytest.raises(WireError, match="share of 3 bytes where 4 were agreed"):
        program.send([message(1, 2, 3, 4), message(1, 2, 3)])
