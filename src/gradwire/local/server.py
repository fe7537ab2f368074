"""Parameter server of asynchronous methods: applies messages of workers as they arrive.

It keeps the common model. At each visit it sends a worker the messages that the others have sent
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


class Said(NamedTuple):
    """One worker's message, and by how much it moves the model."""

    rank: int
    step: int
    weight: float
    message: Tensor
    """Bytes."""


News: TypeAlias = list[Said] | State
"""What a worker has to learn: messages in the order of their arrival, or the whole model."""


class Form:
    """The form of a message about all parameters, known to the server and all workers."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self.names = list(lanes)
        self._codecs: list[OneRound] = []
        for lane in lanes.values():
            assert isinstance(lane.compressor, OneRound)
            self._codecs.append(lane.compressor)
        self._turns = [lane.ctx for lane in lanes.values()]

    def pack(self, messages: Sequence[Parts]) -> Tensor:
        return pack(messages, self._layouts()).cpu()

    def apply(self, model: State, said: Said) -> None:
        """Moves the model (flat, by name) by what was said, in place."""
        buffer = said.message.to(next(iter(model.values())).device)
        messages = unpack(buffer, self._layouts())
        rows = zip(self.names, self._codecs, self._turns, messages, strict=True)
        for name, codec, ctx, parts in rows:
            told: EncodeContext = ctx._replace(rank=said.rank, step=said.step)
            codec.decode_add(model[name], [parts], -said.weight, told)

    def _layouts(self) -> list[Layout]:
        pairs = zip(self._codecs, self._turns, strict=True)
        return [codec.layout(ctx.numel) for codec, ctx in pairs]


class Server:
    """The common model, who is still there, and what each has yet to hear."""

    def __init__(self, model: State, form: Form, workers: int) -> None:
        self.model, self.form = model, form
        self._news: dict[int, list[Said] | None] = {rank: [] for rank in range(workers)}
        self._awaited = set(range(workers))
        self._dense_bytes = sum(tensor.nbytes for tensor in model.values())
        self._change = Condition()

    def visit(self, rank: int, step: int, message: Tensor) -> News:
        """Folds a message in, divided by those who are there; returns what the worker missed."""
        with self._change:
            said = Said(rank, step, 1 / max(1, len(self._news)), message)
            self.form.apply(self.model, said)
            for other, waiting in self._news.items():
                if waiting is not None:
                    self._news[other] = self._bounded([*waiting, said])
            missed = self._news.get(rank)
            if rank in self._news:
                self._news[rank] = []
            return {n: t.clone() for n, t in self.model.items()} if missed is None else missed

    def greet(self, rank: int) -> None:
        """A worker has found its way here."""
        self._awaited.discard(rank)

    def give_up_waiting(self) -> None:
        """Goes on without those who were to come and have not: no connection breaks with them."""
        for rank in sorted(self._awaited):
            self.lose(rank, "it has never come")

    def alive(self) -> list[int]:
        return sorted(self._news)

    def catch_up(self) -> None:
        """Everyone is told the whole model at the next visit, as after a state was loaded."""
        with self._change:
            self._news = dict.fromkeys(self._news)

    def leave(self, rank: int) -> None:
        with self._change:
            self._news.pop(rank, None)
            self._change.notify_all()

    def lose(self, rank: int, why: object) -> None:
        """Goes on without a worker, if it has not left by itself."""
        if rank in self._news:
            self.leave(rank)
            log.warning("worker %d is lost (%s); going on with %s", rank, why, self.alive())

    def wait_until_all_left(self) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._news)

    def _bounded(self, waiting: list[Said]) -> list[Said] | None:
        nbytes = sum(said.message.numel() for said in waiting)
        return waiting if nbytes <= self._dense_bytes else None


def news_bytes(news: Iterable[Said] | State) -> int:
    """How much a worker hears."""
    if isinstance(news, Mapping):
        return sum(tensor.nbytes for tensor in news.values())
    return sum(said.message.numel() for said in news)


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def from_bytes(data: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
