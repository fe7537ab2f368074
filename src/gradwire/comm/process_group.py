"""Runs collectives among the members of a torch process group."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.base import Collective, Comm, Neighbors, Subgroup, checked_sizes
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

PIECES_BYTES = 1 << 20
"""Sent bytes from which a gather and an all-to-all run in pieces at once, which keep gloo's links
busier: of 100 Mbit/s, four ranks that send 2 MB each use 84 instead of 75 in a gather, and 69
instead of 58 in an all-to-all, whose messages share the links of their receivers."""

GATHER_PIECES, ALL_TO_ALL_PIECES = 2, 4

SHUTDOWN = Event()
"""Set when this process ends: from then on no thread waits for other ranks."""

POLL_INTERVAL = timedelta(seconds=0.2)
"""Interval at which a thread that waits for other ranks checks whether the process is ending."""


Begun: TypeAlias = tuple[list[dist.Work], Callable[[], list[Tensor]]]
"""The works of a collective that was begun, and what it returns once they have ended."""


@dataclass(frozen=True)
class StagedCollective:
    """A collective whose buffers are on their way to where it reads them."""

    collective: Collective
    device: torch.device
    copied: torch.cuda.Event | None = None
    """The end of the copies from a GPU to the host; None if none is needed."""

    def is_ready(self) -> bool:
        """Returns whether the collective can be started without a wait for the GPU."""
        return self.copied is None or self.copied.query()


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
        return self._start(self.stage(collective), _nothing).wait()

    def stage(self, collective: Collective) -> StagedCollective:
        """Starts to copy the buffers to the host, if the backend reads them there.

        The copies follow the work on the current stream; the host does not wait for them.
        """
        device = collective.buffers[0].device
        if self.is_direct(device):
            return StagedCollective(collective, device)
        on_host = [
            torch.empty(b.shape, dtype=b.dtype, pin_memory=True).copy_(b, non_blocking=True)
            for b in collective.buffers
        ]
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        return StagedCollective(replace(collective, buffers=on_host), device, copied)

    def start(self, staged: StagedCollective) -> "PendingCollective":
        """Starts a collective; all ranks start theirs in the same order.

        Where ranks must exchange the lengths of messages first, that is waited for here. The time
        from the start to the end counts as wire time, but no moment twice.
        """
        return self._start(staged, self._count_wire_time(monotonic()))

    def _count_wire_time(self, start_s: float) -> Callable[[], None]:
        def ended() -> None:
            now_s = monotonic()
            # Several may be under way at once.
            self.meter.add_time(0.0, max(0.0, now_s - max(start_s, self._idle_since_s)), 0.0)
            self._idle_since_s = now_s

        return ended

    def _start(self, staged: StagedCollective, ended: Callable[[], None]) -> "PendingCollective":
        """Starts a collective; `ended` is called when its end was waited for."""
        collective, device = staged.collective, staged.device
        if collective.subgroup is not None:
            subgroup = self._subgroups[collective.subgroup]
            collective = replace(collective, subgroup=None)
            return subgroup._start(replace(staged, collective=collective), ended)
        if staged.copied is not None:
            staged.copied.synchronize()
        if self.checksum:
            collective = with_checksum(collective)
        wait = self._wait_for_peer if collective.kind == "neighbors" else self._wait
        start_s = monotonic()
        with self._peer_errors(collective.kind, start_s):
            works, results = self._begin(collective)

        def finish() -> list[Tensor]:
            with self._peer_errors(collective.kind, start_s):
                for work in works:
                    wait(work)
            ended()
            received = results()
            if self.checksum:
                received = verified(collective, received, self.rank)
            if staged.copied is None:
                return received
            return [r.to(device, non_blocking=True) for r in received]

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
        if collective.kind == "neighbors":
            return self._neighbors(collective)
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
        works, received = list[dist.Work](), list[Tensor]()
        for sent in buffer.tensor_split(self._pieces((self.size - 1) * longest, GATHER_PIECES)):
            into = _room(self.size * sent.numel(), buffer)
            works.append(_all_gather(into, sent, group=self.group, async_op=True))
            received.append(into.view(self.size, sent.numel()))
        return works, lambda: [row[:n] for row, n in zip(_join(received), sizes, strict=True)]

    def _pieces(self, sent_bytes: int, pieces: int) -> int:
        """Returns in how many pieces to run a collective in which this rank sends so many bytes."""
        return 1 if self.on_device or sent_bytes < PIECES_BYTES else pieces

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
        # All ranks must run the same number of pieces, so they must know each other's lengths.
        longest = max(lengths) if collective.sizes is not None else 0
        works, received = [], []
        pieces = self._pieces((self.size - 1) * longest, ALL_TO_ALL_PIECES)
        for number in range(pieces):
            sent = torch.cat([b.tensor_split(pieces)[number] for b in buffers])
            going = _piece_lengths(lengths, pieces, number)
            coming = _piece_lengths(sizes, pieces, number)
            into = _room(sum(coming), sent)
            work = dist.all_to_all_single(
                into, sent, coming, going, group=self.group, async_op=True
            )
            works.append(work)
            received.append(into.split(coming))
        return works, lambda: [_join(parts) for parts in zip(*received, strict=True)]

    def _broadcast(self, collective: Collective) -> "Begun":
        buffer, root = collective.buffers[0], collective.root
        self.meter.broadcast(buffer.numel(), self.rank == root, inside=self.inside)
        works = []
        if self.size > 1:
            works = [dist.broadcast(buffer, group=self.group, group_src=root, async_op=True)]
        return works, lambda: [buffer]

    def _neighbors(self, collective: Collective) -> "Begun":
        [buffer] = collective.buffers
        peers, sizes = collective.neighbors, collective.sizes
        assert peers is not None, "a collective among neighbors needs them"
        if sizes is None and peers.targets:
            own = torch.tensor([buffer.numel()], device=buffer.device).view(torch.uint8)
            works, words = self._swap(own, peers, [own.numel()] * len(peers.sources))
            for work in works:
                self._wait_for_peer(work)
            self.meter.neighbors(own.numel(), len(peers.targets), len(words) * own.numel())
            announced = [int(word.view(torch.int64)) for word in words]
            sizes = checked_sizes(announced, collective.limits, peers.sources)
        self.meter.neighbors(buffer.numel(), len(peers.targets), sum(sizes or ()))
        works, received = self._swap(buffer, peers, sizes or [])
        return works, lambda: received

    def _swap(
        self, buffer: Tensor, peers: Neighbors, sizes: list[int]
    ) -> tuple[list[dist.Work], list[Tensor]]:
        """Starts to send a buffer to all targets and to receive from all sources, in one batch.

        No operation of a batch waits for another, so that no order of the ranks can block it.
        """
        received = [_room(size, buffer) for size in sizes]
        pairs = [
            *(
                (dist.irecv, row, source)
                for source, row in zip(peers.sources, received, strict=True)
            ),
            *((dist.isend, buffer, target) for target in peers.targets),
        ]
        # An empty message is one that both ends know to be empty.
        ops = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensor, peer in pairs
            if tensor.numel()
        ]
        # gloo returns one work per operation, NCCL one for all of them.
        works = dist.batch_isend_irecv(ops) if ops else []
        return works, received

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective; with NCCL only the stream waits, not the host."""
        while not self.on_device and not work.is_completed():
            with suppress(RuntimeError):
                work.wait(POLL_INTERVAL)
            if SHUTDOWN.is_set():
                raise RuntimeError("this process is ending")
        work.wait()

    def _wait_for_peer(self, work: dist.Work) -> None:
        """Waits for a message to or from one rank, for the group's timeout at most.

        gloo closes all connections of the group when such a wait ends early, so it is one wait.
        """
        if self.on_device:
            work.wait()
        else:
            work.wait(self.group._get_backend(torch.device("cpu")).options._timeout)


def _room(numel: int, like: Tensor) -> Tensor:
    """Returns an empty buffer for what is received, pinned if it goes on to a GPU from there.

    The host would have to wait for a copy from other memory.
    """
    return torch.empty(numel, dtype=like.dtype, device=like.device, pin_memory=like.is_pinned())


def _piece_lengths(lengths: list[int], pieces: int, number: int) -> list[int]:
    """Returns the lengths of one piece of buffers that are split by `torch.tensor_split`."""
    return [length // pieces + (number < length % pieces) for length in lengths]


def _join(pieces: Sequence[Tensor]) -> Tensor:
    """Returns pieces side by side, along their last dimension; pinned if they are."""
    if len(pieces) == 1:
        return pieces[0]
    shape = (*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces))
    joined = _room(sum(piece.numel() for piece in pieces), pieces[0]).view(shape)
    return torch.cat(list(pieces), dim=-1, out=joined)
