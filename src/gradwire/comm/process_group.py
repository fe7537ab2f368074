"""Runs collectives among the members of a torch process group."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.base import Collective, Comm, Subgroup, checked_sizes
from gradwire.comm.checksum import verified, with_checksum
from gradwire.comm.groups import subgroup_process_group
from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError, PeerError

# gloo puts its own source line before the reason, and advice to its developers behind it.
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
_ADVICE = " This is typically caused by"


def peer_error(
    collective: str, rank: int, size: int, waited_s: float, error: Exception
) -> PeerError:
    """Returns the error to raise instead of torch's own, whose reason names the peer's address."""
    first = str(error).strip().partition("\n")[0]
    reason = _SOURCE_LINE.sub("", first).partition(_ADVICE)[0].rstrip(". ")
    return PeerError(
        f"{collective} among {size} ranks failed on rank {rank} after {waited_s:.1f} s: {reason}"
    )


# torch 2.13 renamed the function and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


SPLIT_BYTES = 4 << 20
"""Size from which two rings at once keep gloo's links busier than one (6 % at 100 Mbit/s)."""

SHUTDOWN = Event()
"""Set when this process ends: from then on no thread waits for other ranks."""

POLL_INTERVAL = timedelta(seconds=0.2)
"""Interval at which a thread that waits for other ranks checks whether the process is ending."""


Begun: TypeAlias = tuple[list[dist.Work], Callable[[], list[Tensor]]]
"""The works of a collective that was begun, and what it returns once they have ended."""


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was started."""

    works: list[dist.Work]
    wait: Callable[[], list[Tensor]]
    """Waits for the collective, and returns what it received."""

    def is_completed(self) -> bool:
        """Returns whether `wait` would not block; also after a failure, which it then raises."""
        return all(work.is_completed() for work in self.works)


def _nothing() -> None:
    pass


class ProcessGroupComm(Comm):
    """Runs collectives over a process group, and stages GPU buffers through the host for gloo."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter | None = None,
        inside: bool = False,
        checksum: bool = False,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.meter = Meter() if meter is None else meter
        self.inside = inside
        self.checksum = checksum
        self.on_device = dist.get_backend(group) == "nccl"
        if checksum and self.on_device:
            raise ConfigError(
                "checksum: messages over NCCL never pass through the host, which would have to "
                "compute it; use gloo, or leave it to the links' own"
            )
        self._subgroups: dict[Subgroup, ProcessGroupComm] = {}
        self._idle_since_s = 0.0

    def prepare(self, node: int | None) -> None:
        """Creates the groups inside and between nodes of `node` ranks; called on all ranks.

        Not left to the first collective, which may run in another thread while the user creates
        groups.
        """
        if node is None:
            return
        for subgroup in (Subgroup(node, internode=False), Subgroup(node, internode=True)):
            if subgroup not in self._subgroups:
                group = subgroup_process_group(self.group, subgroup)
                self._subgroups[subgroup] = ProcessGroupComm(
                    group, self.meter, not subgroup.internode, self.checksum
                )

    def run(self, collective: Collective) -> list[Tensor]:
        return self._start(collective, _nothing).wait()

    def start(self, collective: Collective) -> "PendingCollective":
        """Starts a collective; all ranks start theirs in the same order.

        Where ranks must exchange the lengths of messages first, that is waited for here. The time
        from the start to the end counts as wire time, but no moment twice.
        """
        return self._start(collective, self._count_wire_time(monotonic()))

    def _count_wire_time(self, start_s: float) -> Callable[[], None]:
        def ended() -> None:
            now_s = monotonic()
            # Several may be under way at once.
            self.meter.add_time(0.0, max(0.0, now_s - max(start_s, self._idle_since_s)), 0.0)
            self._idle_since_s = now_s

        return ended

    def _start(self, collective: Collective, ended: Callable[[], None]) -> "PendingCollective":
        """Starts a collective; `ended` is called when its end was waited for."""
        if collective.subgroup is not None:
            subgroup = self._subgroups[collective.subgroup]
            return subgroup._start(replace(collective, subgroup=None), ended)
        device = collective.buffers[0].device
        staged = not self.is_direct(device)
        if staged:
            collective = replace(collective, buffers=[_to_host(b) for b in collective.buffers])
        if self.checksum:
            collective = with_checksum(collective)
        start_s = monotonic()
        with self._peer_errors(collective.kind, start_s):
            works, results = self._begin(collective)

        def finish() -> list[Tensor]:
            with self._peer_errors(collective.kind, start_s):
                for work in works:
                    self._wait(work)
            ended()
            received = results()
            if self.checksum:
                received = verified(collective, received, self.rank)
            return [r.to(device, non_blocking=True) for r in received] if staged else received

        return PendingCollective(works, finish)

    def is_direct(self, device: torch.device) -> bool:
        """Returns whether buffers on this device are sent without a copy to the host."""
        return device.type == "cpu" or self.on_device

    def start_mean(self, buffer: Tensor) -> Callable[[], None]:
        """Starts to replace a buffer by its mean over ranks; returns a function that waits for it.

        All ranks start and wait in the same order.
        """
        self.meter.mean(buffer.nbytes, self.size, inside=self.inside)
        start_s = monotonic()
        with self._peer_errors("mean", start_s):
            works = self._start_all_reduce(buffer, 1)
        count_wire_time = self._count_wire_time(start_s)

        def wait() -> None:
            with self._peer_errors("mean", start_s):
                for work in works:
                    self._wait(work)
            count_wire_time()

        return wait

    @contextmanager
    def _peer_errors(self, kind: str, start_s: float) -> Iterator[None]:
        """Turns errors of torch's collectives into PeerError."""
        try:
            yield
        except RuntimeError as error:
            waited_s = monotonic() - start_s
            raise peer_error(kind, self.rank, self.size, waited_s, error) from error

    def _begin(self, collective: Collective) -> "Begun":
        if collective.kind == "mean":
            return self._mean(collective.buffers[0])
        if collective.kind == "gather":
            return self._gather(collective)
        if collective.kind == "all_to_all":
            return self._scatter(collective)
        return self._broadcast(collective)

    def _mean(self, buffer: Tensor) -> "Begun":
        self.meter.mean(buffer.nbytes, self.size, inside=self.inside)
        rings = 1 if self.on_device or buffer.nbytes < SPLIT_BYTES else 2
        return self._start_all_reduce(buffer, rings), lambda: [buffer]

    def _start_all_reduce(self, buffer: Tensor, rings: int) -> list[dist.Work]:
        if self.size == 1:
            return []
        # Scaled before the sum, which keeps 16-bit floats in range; by the factor that DDP uses.
        buffer.mul_(1 / self.size)
        return [
            dist.all_reduce(piece, group=self.group, async_op=True) for piece in buffer.chunk(rings)
        ]

    def _gather(self, collective: Collective) -> "Begun":
        [buffer] = collective.buffers
        if self.size == 1:
            self.meter.gather(buffer.numel(), 1, inside=self.inside)
            return [], lambda: [buffer]
        sizes = collective.sizes
        if sizes is None:
            sizes = checked_sizes(self._gather_sizes(buffer), collective.limits)
        longest = max(sizes)
        if buffer.numel() < longest:
            buffer = torch.cat([buffer, buffer.new_zeros(longest - buffer.numel())])
        self.meter.gather(longest, self.size, inside=self.inside)
        received = buffer.new_empty(self.size * longest)
        work = _all_gather(received, buffer, group=self.group, async_op=True)
        rows = received.view(self.size, longest)
        return [work], lambda: [row[:n] for row, n in zip(rows, sizes, strict=True)]

    def _gather_sizes(self, buffer: Tensor) -> list[int]:
        own = torch.tensor([buffer.numel()], device=buffer.device)
        all_ = own.new_empty(self.size)
        self._wait(_all_gather(all_, own, group=self.group, async_op=True))
        self.meter.gather(own.nbytes, self.size, inside=self.inside)
        sizes: list[int] = all_.tolist()
        return sizes

    def _scatter(self, collective: Collective) -> "Begun":
        buffers, sizes = collective.buffers, collective.sizes
        if self.size == 1:
            self.meter.all_to_all(0, 0, inside=self.inside)
            return [], lambda: buffers
        lengths = [b.numel() for b in buffers]
        if sizes is None:
            own = torch.tensor(lengths, device=buffers[0].device)
            announced = torch.empty_like(own)
            self._wait(dist.all_to_all_single(announced, own, group=self.group, async_op=True))
            others = (self.size - 1) * own.itemsize
            self.meter.all_to_all(others, others, inside=self.inside)
            sizes = checked_sizes(announced.tolist(), collective.limits)
        sent_bytes = sum(lengths) - lengths[self.rank]
        received_bytes = sum(sizes) - sizes[self.rank]
        self.meter.all_to_all(sent_bytes, received_bytes, inside=self.inside)
        received = buffers[0].new_empty(sum(sizes))
        sent = torch.cat(buffers)
        work = dist.all_to_all_single(
            received, sent, sizes, lengths, group=self.group, async_op=True
        )
        return [work], lambda: list(received.split(sizes))

    def _broadcast(self, collective: Collective) -> "Begun":
        buffer, root = collective.buffers[0], collective.root
        self.meter.broadcast(buffer.numel(), self.rank == root, inside=self.inside)
        works = []
        if self.size > 1:
            works = [dist.broadcast(buffer, group=self.group, group_src=root, async_op=True)]
        return works, lambda: [buffer]

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective; with NCCL only the stream waits, not the host."""
        while not self.on_device and not work.is_completed():
            with suppress(RuntimeError):
                work.wait(POLL_INTERVAL)
            if SHUTDOWN.is_set():
                raise RuntimeError("this process is ending")
        work.wait()


def _to_host(buffer: Tensor) -> Tensor:
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    host.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream(buffer.device).synchronize()
    return host
