"""Protocol between workers and a remote parameter server: framing, encoding and validation."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from gradwire.comm.tcp import Mailbox
from gradwire.errors import PeerError, WireError
from gradwire.local.server import News, Said, Server, as_bytes, from_bytes
from gradwire.types import State

_VISIT = struct.Struct("<iq")
_SAID = struct.Struct("<iqdq")
_GOODBYE, _HELLO = -1, -2
"""In place of a step."""


class Counter(Protocol):
    """Where a worker goes: the server itself, or a connection to it."""

    def visit(self, rank: int, step: int, message: torch.Tensor) -> News: ...

    def leave(self, rank: int) -> None: ...


class Correspondence:
    """A server as its workers see it from afar."""

    def __init__(self, box: Mailbox, rank: int, like: State) -> None:
        self._box = box
        self._like = like
        # So that the server knows whom it has lost, should this be the last it hears.
        box.send(_VISIT.pack(rank, _HELLO))

    def visit(self, rank: int, step: int, message: torch.Tensor) -> News:
        with _naming_the_server():
            self._box.send(_VISIT.pack(rank, step) + as_bytes(message))
            letter = self._box.receive()
        return _read_news(letter, self._like)

    def leave(self, rank: int) -> None:
        try:
            with _naming_the_server():
                self._box.send(_VISIT.pack(rank, _GOODBYE))
        finally:
            self._box.close()


def serve(server: Server, box: Mailbox) -> None:
    """Answers one worker's letters until it leaves or is lost."""
    rank = None
    try:
        while True:
            letter = box.receive()
            rank, step = _VISIT.unpack(letter[: _VISIT.size])
            if step == _GOODBYE:
                server.leave(rank)
                return
            if step == _HELLO:
                server.greet(rank)
            else:
                news = server.visit(rank, step, from_bytes(letter[_VISIT.size :]))
                box.send(_write_news(news))
    except Exception as error:
        # Whatever is wrong with one worker's letters, the others must not suffer.
        if rank is not None:
            server.lose(rank, error)


@contextmanager
def _naming_the_server() -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        raise PeerError(f"the server beside worker 0 is gone: {error}") from error


def _write_news(news: News) -> bytes:
    """A byte for the kind; then the model's numbers, or each message behind its head."""
    if isinstance(news, dict):
        return b"\1" + b"".join(as_bytes(tensor) for tensor in news.values())
    heads = [_SAID.pack(s.rank, s.step, s.weight, s.message.numel()) for s in news]
    bodies = [as_bytes(said.message) for said in news]
    return b"\0" + b"".join(h + b for h, b in zip(heads, bodies, strict=True))


def _read_news(letter: bytes, like: State) -> News:
    """What a letter of the server tells; raises WireError where it is none."""
    kind, body = letter[:1], letter[1:]
    if kind == b"\1":
        return _read_model(body, like)
    if kind != b"\0":
        raise WireError(f"the server sends a letter of kind {kind!r}")
    news, place = [], 0
    while place < len(body):
        if len(body) - place < _SAID.size:
            raise WireError(f"the server's letter ends in {len(body) - place} bytes of a head")
        rank, step, weight, length = _SAID.unpack_from(body, place)
        place += _SAID.size
        if not 0 <= length <= len(body) - place:
            raise WireError(f"a message of {length} bytes where {len(body) - place} are left")
        news.append(Said(rank, step, weight, from_bytes(body[place : place + length])))
        place += length
    return news


def _read_model(body: bytes, like: State) -> State:
    expected = sum(tensor.numel() for tensor in like.values())
    if len(body) != 4 * expected:
        raise WireError(f"the server tells a model of {len(body)} bytes, not {4 * expected}")
    pieces = from_bytes(body, torch.float32).split([tensor.numel() for tensor in like.values()])
    return dict(zip(like, pieces, strict=True))
