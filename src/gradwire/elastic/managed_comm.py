"""Runs collectives over the process group of a torchft Manager, which changes with the quorum."""

from collections.abc import Callable
from time import monotonic

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOp,
)

from gradwire.comm.base import Collective, Comm, checked_sizes
from gradwire.comm.checksum import verified, with_checksum
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import peer_error
from gradwire.elastic.manager import Manager


class ManagedComm(Comm):
    """The replicas of the current quorum; `update` follows the Manager to the next one.

    It calls the group's own methods: `torch.distributed` does not know a group that is remade.
    """

    def __init__(self, manager: Manager, checksum: bool = False) -> None:
        self._manager, self._checksum = manager, checksum
        self.meter = Meter()
        self.rank, self.size = 0, 1

    def update(self) -> None:
        """Takes rank and number of replicas from the group of the current quorum."""
        self.rank, self.size = self._manager._pg._rank, self._manager._pg.size()

    def run(self, collective: Collective) -> list[Tensor]:
        assert collective.subgroup is None, "replicas have no subgroups"
        if self._checksum:
            collective = with_checksum(collective)
        start_s = monotonic()
        runs: dict[str, Callable[[Collective], list[Tensor]]] = {
            "mean": self._mean,
            "gather": self._gather,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
        }
        try:
            received = runs[collective.kind](collective)
        except (RuntimeError, AssertionError) as error:
            # torchft asserts that there is a group, which an abort takes away.
            waited_s = monotonic() - start_s
            raise peer_error(collective.kind, self.rank, self.size, waited_s, error) from error
        return verified(collective, received, self.rank) if self._checksum else received

    def _mean(self, collective: Collective) -> list[Tensor]:
        [buffer] = collective.buffers
        self.meter.mean(buffer.nbytes, self.size)
        if self.size > 1:
            # Scaled before the sum, which keeps 16-bit floats in range.
            buffer.mul_(1 / self.size)
            options = AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.SUM)
            self._manager._pg.allreduce([buffer], options).wait()
        return [buffer]

    def _gather(self, collective: Collective) -> list[Tensor]:
        [buffer] = collective.buffers
        if self.size == 1:
            self.meter.gather(buffer.numel(), 1)
            return [buffer]
        sizes = collective.sizes
        if sizes is None:
            own = torch.tensor([buffer.numel()], device=buffer.device)
            self.meter.gather(own.nbytes, self.size)
            sizes = checked_sizes([int(n) for n in self._all_gather(own)], collective.limits)
        longest = max(sizes)
        if buffer.numel() < longest:
            buffer = torch.cat([buffer, buffer.new_zeros(longest - buffer.numel())])
        self.meter.gather(longest, self.size)
        return [row[:n] for row, n in zip(self._all_gather(buffer), sizes, strict=True)]

    def _all_gather(self, buffer: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(buffer) for _ in range(self.size)]
        self._manager._pg.allgather([rows], [buffer], AllgatherOptions()).wait()
        return rows

    def _all_to_all(self, collective: Collective) -> list[Tensor]:
        buffers, sizes = collective.buffers, collective.sizes
        if self.size == 1:
            self.meter.all_to_all(0, 0)
            return buffers
        lengths = [buffer.numel() for buffer in buffers]
        if sizes is None:
            own = torch.tensor(lengths, device=buffers[0].device)
            ones = [1] * self.size
            others = (self.size - 1) * own.itemsize
            self.meter.all_to_all(others, others)
            announced = self._exchange(own, ones, ones)
            sizes = checked_sizes(announced.tolist(), collective.limits)
        sent_bytes = sum(lengths) - lengths[self.rank]
        self.meter.all_to_all(sent_bytes, sum(sizes) - sizes[self.rank])
        return list(self._exchange(torch.cat(buffers), lengths, sizes).split(sizes))

    def _exchange(self, sent: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(sizes))
        group, options = self._manager._pg, AllToAllOptions()
        group.alltoall_base(received, sent, sizes, lengths, options).wait()
        return received

    def _broadcast(self, collective: Collective) -> list[Tensor]:
        [buffer] = collective.buffers
        self.meter.broadcast(buffer.numel(), self.rank == collective.root)
        if self.size > 1:
            options = BroadcastOptions()
            options.rootRank = collective.root
            self._manager._pg.broadcast([buffer], options).wait()
        return [buffer]
