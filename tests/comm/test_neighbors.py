"""Messages to neighbors alone: simulated, over gloo, and mirrored, with the same bytes."""

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Neighbors
from gradwire.comm.cost_model import LinkModel
from gradwire.comm.mirror import CollectiveRecord, MirrorComm
from gradwire.comm.simulated import Simulated
from gradwire.errors import PeerError, WireError
from processes import Jobs, Ranks

jobs = Jobs("neighbor_swaps")


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def one(collective: Collective) -> CollectiveProgram[list[list[int]]]:
    received = yield collective
    return [row.tolist() for row in received]


def along_a_path(limits: int | None) -> list[Collective]:
    """Rank 0 of three sends 1 byte, rank 1 sends 2 bytes to both others, rank 2 sends 3."""
    peers = [(1,), (0, 2), (1,)]
    sizes = [[2], [1, 3], [2]]
    return [
        Collective(
            "neighbors",
            [message(*[rank] * (rank + 1))],
            sizes[rank] if limits is None else None,
            None if limits is None else [limits] * len(own),
            neighbors=Neighbors(own, own),
        )
        for rank, own in enumerate(peers)
    ]


@pytest.mark.parametrize("announced", [False, True])
def test_simulated_ranks_receive_from_their_sources(announced: bool) -> None:
    network = Simulated(3)
    received = network.run([one(c) for c in along_a_path(3 if announced else None)])
    assert received == [[[1, 1]], [[0], [2, 2, 2]], [[1, 1]]]
    word = 8 if announced else 0
    sent = [meter.sent_bytes for meter in network.meters]
    assert sent == [1 + word, 2 * (2 + word), 3 + word]
    arrived = [meter.received_bytes for meter in network.meters]
    assert arrived == [2 + word, 1 + 3 + 2 * word, 2 + word]
    assert [meter.message_bytes for meter in network.meters] == [r + 1 + word for r in range(3)]
    assert [meter.calls for meter in network.meters] == [2 if announced else 1] * 3


def test_directed_edges() -> None:
    network = Simulated(3)
    ring = [Neighbors(((rank + 1) % 3,), ((rank - 1) % 3,)) for rank in range(3)]
    calls = [
        Collective("neighbors", [message(r)], [1], neighbors=own) for r, own in enumerate(ring)
    ]
    assert network.run([one(call) for call in calls]) == [[[2]], [[0]], [[1]]]


def test_a_size_above_its_limit_is_refused() -> None:
    with pytest.raises(WireError, match="rank 2 announces 3 bytes where 2 is the most"):
        Simulated(3).run([one(c) for c in along_a_path(2)])


def test_an_edge_that_only_one_end_knows_is_refused() -> None:
    own = [Neighbors((1,), (1,)), Neighbors((), ())]
    calls = [Collective("neighbors", [message(1)], [1] * len(n.sources), neighbors=n) for n in own]
    with pytest.raises(PeerError, match="only one end knows 0 to 1, 1 to 0"):
        Simulated(2).run([one(call) for call in calls])


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_over_gloo(four_ranks: Ranks, known: bool, checksum: bool) -> None:
    extra = (8 if checksum else 0) + (0 if known else 8)
    for rank, (received, sent, arrived) in enumerate(four_ranks.run(jobs.swapped, known, checksum)):
        peers = [other for other in (rank - 1, rank + 1) if 0 <= other < 4]
        assert received == [[peer] * (peer + 1) for peer in peers]
        assert sent == len(peers) * (rank + 1 + extra)
        assert arrived == sum(peer + 1 + extra for peer in peers)


def test_mirrored_neighbors_and_their_time() -> None:
    mirror = MirrorComm(16)
    peers = Neighbors((1, 15), (1, 15))
    received = mirror.run(Collective("neighbors", [message(1, 2, 3)], [3, 3], neighbors=peers))
    assert [row.tolist() for row in received] == [[1, 2, 3]] * 2
    assert mirror.records == [CollectiveRecord("neighbors", 6, 16, False)]
    assert (mirror.meter.sent_bytes, mirror.meter.received_bytes) == (6, 6)
    # One hop, however many ranks there are, and both messages through one link.
    link = LinkModel(latency_s=0.5, rate_bits=8.0)
    assert link.call_s("neighbors", 6, 16) == 0.5 + 6
