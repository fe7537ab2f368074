"""Runs any number of ranks in lockstep inside this process: no sockets, exact byte counts."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Neighbors, checked_sizes
from gradwire.comm.meter import Meter
from gradwire.errors import PeerError

T = TypeVar("T")


class Simulated:
    """Runs the collectives of all ranks at once; sums are formed in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meters = [Meter() for _ in range(size)]

    def run(self, programs: Sequence[CollectiveProgram[T]]) -> list[T]:
        """Runs one program per rank to its end, and returns their results by rank."""
        results: dict[int, T] = {}
        received: list[list[Tensor] | None] = [None] * self.size
        while True:
            collectives: list[Collective] = []
            for rank, program in enumerate(programs):
                try:
                    answer = received[rank]
                    collectives.append(next(program) if answer is None else program.send(answer))
                except StopIteration as end:
                    results[rank] = end.value
            if not collectives:
                return [results[rank] for rank in range(self.size)]
            if results or len({(c.kind, c.subgroup) for c in collectives}) > 1:
                raise PeerError("simulated ranks are out of step: they make different calls")
            received = list(self._run(collectives))

    def _run(self, collectives: list[Collective]) -> list[list[Tensor]]:
        """Returns what each rank receives, from the ranks of its subgroup."""
        subgroup = collectives[0].subgroup
        received: dict[int, list[Tensor]] = {}
        for ranks in [list(range(self.size))] if subgroup is None else subgroup.groups(self.size):
            inside = subgroup is not None and not subgroup.internode
            peers = _Peers([self.meters[rank] for rank in ranks], inside)
            answers = peers.run([collectives[rank] for rank in ranks])
            received |= zip(ranks, answers, strict=True)
        return [received[rank] for rank in range(self.size)]


class _Peers:
    """The ranks of one collective."""

    def __init__(self, meters: list[Meter], inside: bool) -> None:
        self.size = len(meters)
        self.meters = meters
        self.inside = inside

    def run(self, collectives: list[Collective]) -> list[list[Tensor]]:
        if len({_signature(collective) for collective in collectives}) > 1:
            raise PeerError("simulated ranks are out of step: they make different calls")
        kind = collectives[0].kind
        if kind == "mean":
            return self._mean([c.buffers[0] for c in collectives])
        if kind == "gather":
            return self._gather([c.buffers[0] for c in collectives], collectives[0].sizes)
        if kind == "all_to_all":
            return self._scatter([c.buffers for c in collectives], collectives[0].sizes)
        if kind == "neighbors":
            return self._neighbors(collectives)
        return self._broadcast(collectives)

    def _mean(self, buffers: list[Tensor]) -> list[list[Tensor]]:
        total = buffers[0] / self.size
        for buffer in buffers[1:]:
            total += buffer / self.size
        for meter in self.meters:
            meter.mean(total.nbytes, self.size, inside=self.inside)
        return [[buffer.copy_(total)] for buffer in buffers]

    def _gather(self, buffers: list[Tensor], sizes: list[int] | None) -> list[list[Tensor]]:
        longest = max(buffer.numel() for buffer in buffers)
        for meter in self.meters:
            if sizes is None and self.size > 1:
                meter.gather(torch.int64.itemsize, self.size, inside=self.inside)
            meter.gather(longest, self.size, inside=self.inside)
        return [list(buffers) for _ in buffers]

    def _scatter(self, buffers: list[list[Tensor]], sizes: list[int] | None) -> list[list[Tensor]]:
        received = [[row[rank] for row in buffers] for rank in range(self.size)]
        for rank, meter in enumerate(self.meters):
            if sizes is None and self.size > 1:
                others = (self.size - 1) * torch.int64.itemsize
                meter.all_to_all(others, others, inside=self.inside)
            sent_bytes = sum(b.numel() for to, b in enumerate(buffers[rank]) if to != rank)
            received_bytes = sum(b.numel() for by, b in enumerate(received[rank]) if by != rank)
            meter.all_to_all(sent_bytes, received_bytes, inside=self.inside)
        return received

    def _neighbors(self, collectives: list[Collective]) -> list[list[Tensor]]:
        buffers = [collective.buffers[0] for collective in collectives]
        received = [[buffers[source] for source in own.sources] for own in _peers_of(collectives)]
        for collective, meter, arrived in zip(collectives, self.meters, received, strict=True):
            assert collective.neighbors is not None
            targets, sizes = len(collective.neighbors.targets), [b.numel() for b in arrived]
            if collective.sizes is None and collective.neighbors.targets:
                word = torch.int64.itemsize
                meter.neighbors(word, targets, len(arrived) * word)
                checked_sizes(sizes, collective.limits, collective.neighbors.sources)
            meter.neighbors(collective.buffers[0].numel(), targets, sum(sizes))
        return received

    def _broadcast(self, collectives: list[Collective]) -> list[list[Tensor]]:
        root = collectives[0].root
        buffer = collectives[root].buffers[0]
        for rank, meter in enumerate(self.meters):
            meter.broadcast(buffer.numel(), rank == root, inside=self.inside)
        return [[buffer] for _ in collectives]


def _peers_of(collectives: list[Collective]) -> list[Neighbors]:
    """Returns the peers of every rank; raises PeerError if a message has only one end."""
    found = []
    for rank, collective in enumerate(collectives):
        assert collective.neighbors is not None, f"rank {rank} names no neighbors"
        found.append(collective.neighbors)
    sent = {(rank, to) for rank, own in enumerate(found) for to in own.targets}
    expected = {(source, rank) for rank, own in enumerate(found) for source in own.sources}
    if sent != expected:
        pairs = ", ".join(f"{source} to {to}" for source, to in sorted(sent ^ expected))
        raise PeerError(f"simulated ranks have different neighbors: only one end knows {pairs}")
    return found


def _signature(collective: Collective) -> tuple[object, ...]:
    """Returns the fields that must be equal on all ranks that take part in one collective."""
    buffer = collective.buffers[0]
    length = buffer.numel() if collective.kind in ("mean", "broadcast") else None
    sizes = tuple(collective.sizes or ()) if collective.kind == "gather" else None
    return collective.kind, collective.root, buffer.dtype, length, sizes
