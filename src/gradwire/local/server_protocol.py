"""Protocol between workers and a remote parameter server: framing, encoding and validation."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from gradwire.comm.tcp import Connection
from gradwire.errors import PeerError, WireError
from gradwire.local.server import Reply, Server, Update, as_bytes, from_bytes
from gradwire.types import State

_REQUEST_HEADER = struct.Struct("<iq")
"""Rank and step."""
_UPDATE_HEADER = struct.Struct("<iqdq")
"""Rank, step, weight and length of the message."""
_LEAVE, _CONNECT = -1, -2
"""Requests of another kind, in place of a step."""


class ServerEndpoint(Protocol):
    """Access of a worker to the server: the server itself, or a connection to it."""

    def sync(self, rank: int, step: int, message: torch.Tensor) -> Reply: ...

    def leave(self, rank: int) -> None: ...


class RemoteServer:
    """A server in another process, behind a connection."""

    def __init__(self, connection: Connection, rank: int, like: State) -> None:
        self._connection = connection
        self._like = like
        # The server then knows which worker is lost if no other request follows.
        connection.send(_REQUEST_HEADER.pack(rank, _CONNECT))

    def sync(self, rank: int, step: int, message: torch.Tensor) -> Reply:
        with _server_errors():
            self._connection.send(_REQUEST_HEADER.pack(rank, step) + as_bytes(message))
            reply = self._connection.receive()
        return _decode_reply(reply, self._like)

    def leave(self, rank: int) -> None:
        try:
            with _server_errors():
                self._connection.send(_REQUEST_HEADER.pack(rank, _LEAVE))
        finally:
            self._connection.close()


def serve(server: Server, connection: Connection) -> None:
    """Answers one worker's requests until it leaves or is lost."""
    rank = None
    try:
        while True:
            request = connection.receive()
            rank, step = _REQUEST_HEADER.unpack(request[: _REQUEST_HEADER.size])
            if step == _LEAVE:
                server.leave(rank)
                return
            if step == _CONNECT:
                server.connected(rank)
            else:
                reply = server.sync(rank, step, from_bytes(request[_REQUEST_HEADER.size :]))
                connection.send(_encode_reply(reply))
    except Exception as error:
        # A malformed request of one worker must not affect the others.
        if rank is not None:
            server.drop(rank, error)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        raise PeerError(f"the server on worker 0 is gone: {error}") from error


def _encode_reply(reply: Reply) -> bytes:
    """Encodes a byte for the kind; then the model, or each update's message behind its header."""
    if isinstance(reply, dict):
        return b"\1" + b"".join(as_bytes(tensor) for tensor in reply.values())
    headers = [_UPDATE_HEADER.pack(u.rank, u.step, u.weight, u.message.numel()) for u in reply]
    bodies = [as_bytes(update.message) for update in reply]
    return b"\0" + b"".join(h + b for h, b in zip(headers, bodies, strict=True))


def _decode_reply(data: bytes, like: State) -> Reply:
    """Decodes a reply of the server; raises WireError if it is malformed."""
    kind, body = data[:1], data[1:]
    if kind == b"\1":
        return _decode_model(body, like)
    if kind != b"\0":
        raise WireError(f"the server sent a reply of kind {kind!r}")
    updates, offset = [], 0
    while offset < len(body):
        if len(body) - offset < _UPDATE_HEADER.size:
            raise WireError(f"the server's reply ends in {len(body) - offset} bytes of a header")
        rank, step, weight, length = _UPDATE_HEADER.unpack_from(body, offset)
        offset += _UPDATE_HEADER.size
        if not 0 <= length <= len(body) - offset:
            raise WireError(f"a message of {length} bytes where {len(body) - offset} are left")
        updates.append(Update(rank, step, weight, from_bytes(body[offset : offset + length])))
        offset += length
    return updates


def _decode_model(body: bytes, like: State) -> State:
    expected = sum(tensor.numel() for tensor in like.values())
    if len(body) != 4 * expected:
        raise WireError(f"the server sent a model of {len(body)} bytes, not {4 * expected}")
    pieces = from_bytes(body, torch.float32).split([tensor.numel() for tensor in like.values()])
    return dict(zip(like, pieces, strict=True))
