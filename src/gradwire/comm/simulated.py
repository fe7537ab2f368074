"""Any number of ranks in lock step inside this process: no sockets, exact byte counts."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.errors import PeerError

T = TypeVar("T")


class Simulated:
    """Answers the calls of all ranks at once; sums run in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meters = [Meter() for _ in range(size)]

    def run(self, conversations: Sequence[CollectiveProgram[T]]) -> list[T]:
        """Leads one conversation a rank to its end, and returns their results by rank."""
        results: dict[int, T] = {}
        answers: list[list[Tensor] | None] = [None] * self.size
        while True:
            calls: list[Collective] = []
            for rank, talk in enumerate(conversations):
                try:
                    answer = answers[rank]
                    calls.append(next(talk) if answer is None else talk.send(answer))
                except StopIteration as end:
                    results[rank] = end.value
            if not calls:
                return [results[rank] for rank in range(self.size)]
            if results or len({(call.kind, call.ring) for call in calls}) > 1:
                raise PeerError("simulated ranks are out of step: they make different calls")
            answers = list(self._answer(calls))

    def _answer(self, calls: list[Collective]) -> list[list[Tensor]]:
        """Each rank's answer, given by the ranks of its ring."""
        ring = calls[0].ring
        answers: dict[int, list[Tensor]] = {}
        for ranks in [list(range(self.size))] if ring is None else ring.groups(self.size):
            inside = ring is not None and not ring.across
            peers = _Peers([self.meters[rank] for rank in ranks], inside)
            answered = peers.answer([calls[rank] for rank in ranks])
            answers |= zip(ranks, answered, strict=True)
        return [answers[rank] for rank in range(self.size)]


class _Peers:
    """Ranks that make a call together."""

    def __init__(self, meters: list[Meter], inside: bool) -> None:
        self.size = len(meters)
        self.meters = meters
        self.inside = inside

    def answer(self, calls: list[Collective]) -> list[list[Tensor]]:
        if len({_form(call) for call in calls}) > 1:
            raise PeerError("simulated ranks are out of step: they make different calls")
        kind = calls[0].kind
        if kind == "mean":
            return self._mean([call.buffers[0] for call in calls])
        if kind == "gather":
            return self._gather([call.buffers[0] for call in calls], calls[0].sizes)
        if kind == "scatter":
            return self._scatter([call.buffers for call in calls], calls[0].sizes)
        return self._broadcast(calls)

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
        answers = [[row[rank] for row in buffers] for rank in range(self.size)]
        for rank, meter in enumerate(self.meters):
            if sizes is None and self.size > 1:
                others = (self.size - 1) * torch.int64.itemsize
                meter.scatter(others, others, inside=self.inside)
            sent = sum(b.numel() for to, b in enumerate(buffers[rank]) if to != rank)
            received = sum(b.numel() for by, b in enumerate(answers[rank]) if by != rank)
            meter.scatter(sent, received, inside=self.inside)
        return answers

    def _broadcast(self, calls: list[Collective]) -> list[list[Tensor]]:
        root = calls[0].root
        buffer = calls[root].buffers[0]
        for rank, meter in enumerate(self.meters):
            meter.broadcast(buffer.numel(), rank == root, inside=self.inside)
        return [[buffer] for _ in calls]


def _form(call: Collective) -> tuple[object, ...]:
    """What must be alike on all ranks for a call to be one and the same."""
    buffer = call.buffers[0]
    length = buffer.numel() if call.kind in ("mean", "broadcast") else None
    sizes = tuple(call.sizes or ()) if call.kind == "gather" else None
    return call.kind, call.root, buffer.dtype, length, sizes
