"""Parameter server of asynchronous methods: applies messages of workers as they arrive.

It keeps the common model. At each sync it sends a worker the messages that the others have sent
since, so that the worker arrives at the same model, bit by bit on the same kind of device. It sends
the model itself where the messages would be longer.
"""

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.engine.step import Lane
from gradwire.errors import NonFiniteError, PeerError, WireError
from gradwire.types import EncodeContext, Layout, Parts, State
from gradwire.wire.layout import max_packed_bytes, pack, unpack

log = logging.getLogger("gradwire")

UPDATE_HEADER = struct.Struct("<iqdq")
"""Rank, step, weight and length of the message that follows."""

MAX_STEP = 1 << 62


class Update(NamedTuple):
    """One worker's message, and the weight with which it moves the model."""

    rank: int
    step: int
    weight: float
    message: Tensor
    """Bytes."""


Reply: TypeAlias = list[Update] | State
"""The server's answer to a worker: updates in the order of their arrival, or the whole model."""


class MessageFormat:
    """The layout of a message about all parameters, known to the server and all workers."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self.names = list(lanes)
        self._codecs: list[OneRound] = []
        for lane in lanes.values():
            assert isinstance(lane.compressor, OneRound)
            self._codecs.append(lane.compressor)
        self._contexts = [lane.ctx for lane in lanes.values()]

    def max_bytes(self) -> int:
        """Returns the most bytes that a message may have."""
        return max_packed_bytes(self._layouts())

    def pack(self, messages: Sequence[Parts]) -> Tensor:
        return pack(messages, self._layouts()).cpu()

    def apply(self, model: State, update: Update) -> None:
        """Moves the model (flat tensors by name) by an update, in place."""
        buffer = update.message.to(next(iter(model.values())).device)
        messages = unpack(buffer, self._layouts())
        rows = zip(self.names, self._codecs, self._contexts, messages, strict=True)
        for name, codec, ctx, parts in rows:
            sender: EncodeContext = ctx._replace(rank=update.rank, step=update.step)
            codec.decode_add(model[name], [parts], -update.weight, sender)

    def _layouts(self) -> list[Layout]:
        pairs = zip(self._codecs, self._contexts, strict=True)
        return [codec.layout(ctx.numel) for codec, ctx in pairs]


@dataclass
class _Worker:
    """The server's record of one worker."""

    status: Literal["expected", "connected", "left", "lost"] = "expected"
    next_step: int | None = None
    """Step of its next message; None until it has connected."""
    pending: list[Update] | None = field(default_factory=list)
    """The updates that it has yet to get; None if it gets the whole model instead."""

    @property
    def is_alive(self) -> bool:
        return self.status in ("expected", "connected")


class RankInUse(PeerError):
    """A worker of this rank is connected already."""


class Server:
    """The common model, the workers, and the updates that each has yet to get.

    A message counts once: each worker's steps must follow one another. A message after which the
    model would not be finite is refused. Counts are `lost`, `rejoined` and `refused_updates`.
    """

    def __init__(self, model: State, message_format: MessageFormat, workers: int) -> None:
        self.model, self.format = model, message_format
        self.lost = self.rejoined = self.refused_updates = 0
        self._workers = [_Worker() for _ in range(workers)]
        # An update is applied to this copy, and counts if the result is finite.
        self._next_model = {name: torch.empty_like(tensor) for name, tensor in model.items()}
        self._dense_bytes = sum(tensor.nbytes for tensor in model.values())
        self._changed = Condition()
        self._closed = False

    def join(self, rank: int, step: int) -> int:
        """Connects a worker whose next message has this step; returns the step that it must have.

        They differ if the worker comes back with an earlier state, or after a lost reply. Raises
        RankInUse while another connection has this rank.
        """
        with self._changed:
            if not 0 <= rank < len(self._workers):
                raise WireError(f"rank must be 0 to {len(self._workers) - 1}, got {rank}")
            if not 0 <= step < MAX_STEP:
                raise WireError(f"step must be 0 to {MAX_STEP - 1}, got {step}")
            worker = self._workers[rank]
            if worker.status == "connected":
                raise RankInUse(f"worker {rank} is connected already")
            if not worker.is_alive:
                self.rejoined += 1
                worker.pending = None
                log.warning("worker %d has rejoined", rank)
            worker.status = "connected"
            if worker.next_step is None:
                worker.next_step = step
            return worker.next_step

    def sync(self, rank: int, step: int, message: Tensor) -> Reply:
        """Applies a message, divided by the number of workers; returns what the worker missed."""
        with self._changed:
            worker = self._connected(rank)
            if step != worker.next_step:
                raise WireError(f"message {step} of worker {rank}, expected {worker.next_step}")
            update = Update(rank, step, 1 / len(self.alive()), message)
            self._apply(update)
            worker.next_step = step + 1
            for other in self._workers:
                if other.is_alive and other.pending is not None:
                    other.pending = self._bounded([*other.pending, update])
            missed, worker.pending = worker.pending, []
            return self.snapshot() if missed is None else missed

    def fetch(self, rank: int) -> Reply:
        """Returns the whole model to a worker that has rejoined."""
        with self._changed:
            self._connected(rank).pending = []
            return self.snapshot()

    def ping(self, rank: int) -> None:
        """Does nothing; over a connection it shows that the worker still takes steps."""

    def snapshot(self) -> State:
        """Returns a copy of the model between two updates."""
        with self._changed:
            return {name: tensor.clone() for name, tensor in self.model.items()}

    def drop_unconnected(self) -> None:
        """Drops the workers that have never connected: no broken connection would show them."""
        with self._changed:
            for rank, worker in enumerate(self._workers):
                if worker.status == "expected":
                    self.drop(rank, "it has never connected")

    def alive(self) -> list[int]:
        """Returns the workers that take part: all that have neither left nor been lost."""
        return [rank for rank, worker in enumerate(self._workers) if worker.is_alive]

    def lost_ranks(self) -> list[int]:
        """Returns the workers that are lost and have not rejoined."""
        return [rank for rank, worker in enumerate(self._workers) if worker.status == "lost"]

    def resend_model(self) -> None:
        """Sends everyone the whole model at the next sync, as after a state was loaded."""
        with self._changed:
            for worker in self._workers:
                worker.pending = None

    def leave(self, rank: int, *, failed: bool = False) -> None:
        """Continues without a worker that has ended its context; after an error it is lost."""
        if failed:
            self.drop(rank, "its context ended with an error")
            return
        with self._changed:
            self._end(rank, "left")

    def drop(self, rank: int, reason: object) -> None:
        """Continues without a lost worker, unless it has left by itself."""
        with self._changed:
            if not self._workers[rank].is_alive or self._closed:
                return
            self._end(rank, "lost")
            self.lost += 1
            others = self.alive()
        log.warning("worker %d is lost (%s); continuing with %s", rank, reason, others)

    def wait_until_all_left(self) -> None:
        """Returns when no worker is left; those that no longer answer are dropped by then."""
        with self._changed:
            self._changed.wait_for(lambda: not self.alive())

    def close(self) -> None:
        """Ends the service: connections that break from now on are not lost workers."""
        with self._changed:
            self._closed = True

    def _connected(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        if worker.status != "connected":
            raise PeerError(f"worker {rank} is not connected: it is {worker.status}")
        return worker

    def _end(self, rank: int, status: Literal["left", "lost"]) -> None:
        self._workers[rank].status, self._workers[rank].pending = status, None
        self._changed.notify_all()

    def _apply(self, update: Update) -> None:
        for name, tensor in self.model.items():
            self._next_model[name].copy_(tensor)
        self.format.apply(self._next_model, update)
        bad = nonfinite_name(self._next_model)
        if bad is not None:
            self.refused_updates += 1
            text = f"message {update.step} of worker {update.rank} makes {bad!r} non-finite"
            log.warning("%s; it is refused", text)
            raise NonFiniteError(text)
        for name, tensor in self.model.items():
            self.model[name], self._next_model[name] = self._next_model[name], tensor

    def _bounded(self, pending: list[Update]) -> list[Update] | None:
        nbytes = sum(UPDATE_HEADER.size + update.message.numel() for update in pending)
        return pending if nbytes <= self._dense_bytes else None


def nonfinite_name(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the first tensor that is not finite, if there is one."""
    for name, tensor in tensors.items():
        # One pass without a copy: both are NaN if any entry is.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return name
    return None


def reply_bytes(reply: Iterable[Update] | State) -> int:
    """Returns the length of a reply's content."""
    if isinstance(reply, Mapping):
        return sum(tensor.nbytes for tensor in reply.values())
    return sum(update.message.numel() for update in reply)


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def from_bytes(data: bytes | bytearray, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
