"""Parameter server of asynchronous methods: applies messages of workers as they arrive.

It keeps the common model. At each sync it sends a worker the messages that the others have sent
since, so that the worker arrives at the same model, bit by bit on the same kind of device. It sends
the model itself where the messages would be longer.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from threading import Condition
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.engine.step import Lane
from gradwire.types import EncodeContext, Layout, Parts, State
from gradwire.wire.layout import pack, unpack

log = logging.getLogger("gradwire")


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


class Server:
    """The common model, the connected workers, and the updates that each has yet to get."""

    def __init__(self, model: State, message_format: MessageFormat, workers: int) -> None:
        self.model, self.format = model, message_format
        self._pending: dict[int, list[Update] | None] = {rank: [] for rank in range(workers)}
        self._unconnected = set(range(workers))
        self._dense_bytes = sum(tensor.nbytes for tensor in model.values())
        self._changed = Condition()

    def sync(self, rank: int, step: int, message: Tensor) -> Reply:
        """Applies a message, divided by the number of workers; returns what the worker missed."""
        with self._changed:
            update = Update(rank, step, 1 / max(1, len(self._pending)), message)
            self.format.apply(self.model, update)
            for other, pending in self._pending.items():
                if pending is not None:
                    self._pending[other] = self._bounded([*pending, update])
            missed = self._pending.get(rank)
            if rank in self._pending:
                self._pending[rank] = []
            return {n: t.clone() for n, t in self.model.items()} if missed is None else missed

    def connected(self, rank: int) -> None:
        """Notes that a worker has connected."""
        self._unconnected.discard(rank)

    def drop_unconnected(self) -> None:
        """Drops the workers that have never connected: no broken connection would show them."""
        for rank in sorted(self._unconnected):
            self.drop(rank, "it has never connected")

    def alive(self) -> list[int]:
        return sorted(self._pending)

    def resend_model(self) -> None:
        """Sends everyone the whole model at the next sync, as after a state was loaded."""
        with self._changed:
            self._pending = dict.fromkeys(self._pending)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._pending.pop(rank, None)
            self._changed.notify_all()

    def drop(self, rank: int, reason: object) -> None:
        """Continues without a lost worker, unless it has left by itself."""
        if rank in self._pending:
            self.leave(rank)
            log.warning("worker %d is lost (%s); continuing with %s", rank, reason, self.alive())

    def wait_until_all_left(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def _bounded(self, pending: list[Update]) -> list[Update] | None:
        nbytes = sum(update.message.numel() for update in pending)
        return pending if nbytes <= self._dense_bytes else None


def reply_bytes(reply: Iterable[Update] | State) -> int:
    """Returns the length of a reply's content."""
    if isinstance(reply, Mapping):
        return sum(tensor.nbytes for tensor in reply.values())
    return sum(update.message.numel() for update in reply)


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def from_bytes(data: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
