"""Collectives over a Manager's group give what simulated ranks give, with the same byte counts."""

from dataclasses import replace

import pytest
import torch
from fake_torchft import Cluster, FakeManager
from torch import Tensor

from gradwire import PeerError, WireError
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.elastic.managed_comm import ManagedComm

SIZE = 3


def run(collectives: list[Collective], checksum: bool = False) -> list[object]:
    """Runs a collective on three replicas; returns what each received and has counted."""
    cluster = Cluster()
    managers = [FakeManager(cluster) for _ in range(SIZE)]

    def one(rank: int) -> object:
        manager, comm = managers[rank], ManagedComm(managers[rank], checksum)
        manager.start_quorum()
        comm.update()
        assert (comm.rank, comm.size) == (rank, SIZE)
        return comm.run(collectives[rank]), replace(comm.meter)

    return cluster.run(managers, one)


def content(rank: int, nbytes: int) -> Tensor:
    return torch.arange(nbytes, dtype=torch.uint8) + 10 * rank


def gathers(sizes: list[int] | None) -> list[Collective]:
    limits = None if sizes else [8] * SIZE
    return [Collective("gather", [content(r, 4 + r)], sizes, limits) for r in range(SIZE)]


def scatters(*, announced: bool) -> list[Collective]:
    found = []
    for rank in range(SIZE):
        buffers = [content(10 * rank + to, 2 + to + rank) for to in range(SIZE)]
        sizes = None if announced else [2 + rank + other for other in range(SIZE)]
        found.append(Collective("all_to_all", buffers, sizes, [9] * SIZE if announced else None))
    return found


CASES = {
    "mean": lambda: [Collective("mean", [torch.full((5,), 3.0 * r)]) for r in range(SIZE)],
    "gather": lambda: gathers([4, 5, 6]),
    "gather of announced sizes": lambda: gathers(None),
    "all to all": lambda: scatters(announced=False),
    "all to all of announced sizes": lambda: scatters(announced=True),
    "broadcast": lambda: [Collective("broadcast", [content(r, 6)], root=1) for r in range(SIZE)],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("checksum", [False, True])
def test_collectives_are_those_of_simulated_ranks(name: str, checksum: bool) -> None:
    network = Simulated(SIZE)

    def program(collective: Collective) -> CollectiveProgram[list[Tensor]]:
        return (yield collective)

    expected = network.run([program(collective) for collective in CASES[name]()])
    found = run(CASES[name](), checksum)
    for rank, (received, meter) in enumerate(found):
        assert len(received) == len(expected[rank])
        for one, other in zip(received, expected[rank], strict=True):
            torch.testing.assert_close(one, other)
        if not checksum:
            assert meter.sent_bytes == network.meters[rank].sent_bytes
            assert meter.received_bytes == network.meters[rank].received_bytes


def test_a_size_above_its_limit_is_refused() -> None:
    found = run([Collective("gather", [content(0, 9)], limits=[8] * SIZE)] * SIZE)
    assert all(isinstance(error, WireError) for error in found)


def test_a_lost_group_is_a_peer_error() -> None:
    comm = ManagedComm(FakeManager(Cluster()))
    comm.size = 2
    with pytest.raises(PeerError, match="mean among 2 ranks failed on rank 0"):
        comm.run(Collective("mean", [torch.ones(3)]))
