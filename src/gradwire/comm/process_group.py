"""Ranks that are the members of a torch process group."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from threading import Event
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.base import Collective, Comm, Subgroup, bounded
from gradwire.comm.checksum import opened, sealed
from gradwire.comm.groups import subgroup_process_group
from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError, PeerError

# gloo puts its own source line before the reason, and advice to its developers behind it.
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
_ADVICE = " This is typically caused by"


def peer_error(
    collective: str, rank: int, size: int, waited_s: float, error: Exception
) -> PeerError:
    """The error to raise instead of torch's own, whose reason names the peer's address."""
    first = str(error).strip().partition("\n")[0]
    reason = _SOURCE_LINE.sub("", first).partition(_ADVICE)[0].rstrip(". ")
    return PeerError(
        f"{collective} among {size} ranks failed on rank {rank} after {waited_s:.1f} s: {reason}"
    )


# torch 2.13 renamed the function and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


SPLIT_BYTES = 4 << 20
"""From here on two rings at once keep gloo's links busier than one (6 % at 100 Mbit/s)."""

SHUTDOWN = Event()
"""Set when this process ends: from then on nobody waits for other ranks."""

POLL_INTERVAL = timedelta(seconds=0.2)
"""How often whoever waits for other ranks looks whether the process is ending."""


class ProcessGroupComm(Comm):
    """Carries calls over a process group, and stages GPU buffers through the host for gloo."""

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
        self._among: dict[Subgroup, ProcessGroupComm] = {}
        self._free_s = 0.0

    def prepare(self, node: int | None) -> None:
        """Makes the groups inside and across nodes of so many ranks; called on all ranks alike.

        Not left to the first call: that may come from another thread, while the user makes groups.
        """
        if node is None:
            return
        for ring in (Subgroup(node, across=False), Subgroup(node, across=True)):
            if ring not in self._among:
                group = subgroup_process_group(self.group, ring)
                self._among[ring] = ProcessGroupComm(
                    group, self.meter, not ring.across, self.checksum
                )

    def answer(self, call: Collective) -> list[Tensor]:
        if call.ring is not None:
            return self._among[call.ring].answer(replace(call, ring=None))
        device = call.buffers[0].device
        staged = not self.is_direct(device)
        if staged:
            call = replace(call, buffers=[_to_host(b) for b in call.buffers])
        if self.checksum:
            call = sealed(call)
        with self._peers(call.kind, monotonic()):
            answers = self._carry(call)
        if self.checksum:
            answers = opened(call, answers, self.rank)
        return [a.to(device, non_blocking=True) for a in answers] if staged else answers

    def is_direct(self, device: torch.device) -> bool:
        """Whether what lies on this device is sent from there, without a way through the host."""
        return device.type == "cpu" or self.on_device

    def start_mean(self, buffer: Tensor) -> Callable[[], None]:
        """Begins to make of a buffer its mean over ranks, and returns what waits until it is done.

        Begun in the same order on all ranks, and awaited in that order.
        """
        self.meter.mean(buffer.nbytes, self.size, inside=self.inside)
        start_s = monotonic()
        with self._peers("mean", start_s):
            works = self._begin(buffer, 1)

        def wait() -> None:
            with self._peers("mean", start_s):
                for work in works:
                    self._await(work)
            now_s = monotonic()
            # Several may be under way at once.
            self.meter.spent(0.0, now_s - max(start_s, self._free_s), 0.0)
            self._free_s = now_s

        return wait

    @contextmanager
    def _peers(self, kind: str, start_s: float) -> Iterator[None]:
        """Calls for which other ranks are needed; what goes wrong there is a PeerError."""
        try:
            yield
        except RuntimeError as error:
            waited_s = monotonic() - start_s
            raise peer_error(kind, self.rank, self.size, waited_s, error) from error

    def _carry(self, call: Collective) -> list[Tensor]:
        if call.kind == "mean":
            return [self._mean(call.buffers[0])]
        if call.kind == "gather":
            return self._gather(call)
        if call.kind == "scatter":
            return self._scatter(call)
        return [self._broadcast(call)]

    def _mean(self, buffer: Tensor) -> Tensor:
        self.meter.mean(buffer.nbytes, self.size, inside=self.inside)
        for work in self._begin(buffer, 1 if self.on_device or buffer.nbytes < SPLIT_BYTES else 2):
            self._await(work)
        return buffer

    def _begin(self, buffer: Tensor, rings: int) -> list[dist.Work]:
        if self.size == 1:
            return []
        # Before the sum, which keeps 16-bit floats in range; by what DDP multiplies with.
        buffer.mul_(1 / self.size)
        return [
            dist.all_reduce(piece, group=self.group, async_op=True) for piece in buffer.chunk(rings)
        ]

    def _gather(self, call: Collective) -> list[Tensor]:
        [buffer] = call.buffers
        if self.size == 1:
            self.meter.gather(buffer.numel(), 1, inside=self.inside)
            return [buffer]
        sizes = call.sizes
        if sizes is None:
            sizes = bounded(self._tell_sizes(buffer), call.limits)
        longest = max(sizes)
        if buffer.numel() < longest:
            buffer = torch.cat([buffer, buffer.new_zeros(longest - buffer.numel())])
        self.meter.gather(longest, self.size, inside=self.inside)
        heard = buffer.new_empty(self.size * longest)
        self._await(_all_gather(heard, buffer, group=self.group, async_op=True))
        return [row[:n] for row, n in zip(heard.view(self.size, longest), sizes, strict=True)]

    def _tell_sizes(self, buffer: Tensor) -> list[int]:
        own = torch.tensor([buffer.numel()], device=buffer.device)
        all_ = own.new_empty(self.size)
        self._await(_all_gather(all_, own, group=self.group, async_op=True))
        self.meter.gather(own.nbytes, self.size, inside=self.inside)
        sizes: list[int] = all_.tolist()
        return sizes

    def _scatter(self, call: Collective) -> list[Tensor]:
        buffers, sizes = call.buffers, call.sizes
        if self.size == 1:
            self.meter.scatter(0, 0, inside=self.inside)
            return buffers
        lengths = [b.numel() for b in buffers]
        if sizes is None:
            told = torch.tensor(lengths, device=buffers[0].device)
            heard_sizes = torch.empty_like(told)
            self._await(dist.all_to_all_single(heard_sizes, told, group=self.group, async_op=True))
            others = (self.size - 1) * told.itemsize
            self.meter.scatter(others, others, inside=self.inside)
            sizes = bounded(heard_sizes.tolist(), call.limits)
        sent, received = sum(lengths) - lengths[self.rank], sum(sizes) - sizes[self.rank]
        self.meter.scatter(sent, received, inside=self.inside)
        heard = buffers[0].new_empty(sum(sizes))
        said = torch.cat(buffers)
        self._await(
            dist.all_to_all_single(heard, said, sizes, lengths, group=self.group, async_op=True)
        )
        return list(heard.split(sizes))

    def _broadcast(self, call: Collective) -> Tensor:
        buffer = call.buffers[0]
        self.meter.broadcast(buffer.numel(), self.rank == call.root, inside=self.inside)
        if self.size > 1:
            self._await(
                dist.broadcast(buffer, group=self.group, group_src=call.root, async_op=True)
            )
        return buffer

    def _await(self, work: dist.Work) -> None:
        """Waits for a collective; on a GPU's own backend the stream does, and nobody here."""
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
