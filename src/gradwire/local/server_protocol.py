"""Protocol between workers and a remote parameter server: handshake, encoding and validation.

A connection belongs to the rank of its handshake, whatever it sends later. Requests and replies
begin with a byte for their kind.
"""

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from time import monotonic, sleep
from typing import NamedTuple, Protocol

import torch

from gradwire.comm.tcp import Connection, PeerTimeout, connect
from gradwire.errors import GradwireError, NonFiniteError, PeerError, WireError
from gradwire.local.server import (
    MAX_STEP,
    UPDATE_HEADER,
    RankInUse,
    Reply,
    Server,
    Update,
    as_bytes,
    from_bytes,
    nonfinite_name,
)
from gradwire.types import State

log = logging.getLogger("gradwire")

_HELLO = struct.Struct("<iq32s")
"""Rank, step of the next message, and a digest of the settings: a worker's first message."""
_WELCOME = struct.Struct("<qd")
"""Step that the next message must have, and the server's timeout in seconds."""
_ACCEPTED, _REFUSED, _IN_USE = b"\0", b"\1", b"\2"
_MAX_ANSWER_BYTES = 512
_RETRY_S = 0.1
_PINGS_PER_TIMEOUT = 4

_STEP = struct.Struct("<q")
_SYNC, _FETCH, _PING, _LEAVE = b"\0", b"\1", b"\2", b"\3"
_UPDATES, _MODEL, _NONFINITE = b"\0", b"\1", b"\2"


class ServerEndpoint(Protocol):
    """Access of a worker to the server: the server itself, or a connection to it."""

    def join(self, rank: int, step: int) -> int: ...

    def sync(self, rank: int, step: int, message: torch.Tensor) -> Reply: ...

    def fetch(self, rank: int) -> Reply: ...

    def ping(self, rank: int) -> None: ...

    def leave(self, rank: int, *, failed: bool = False) -> None: ...


class ServerAddress(NamedTuple):
    """All that a worker needs to connect: who holds the token may take part."""

    address: tuple[str, int]
    token: bytes
    settings: bytes
    """A digest of 32 bytes, which must be equal on all workers."""


class RemoteServer:
    """A server in another process, behind a connection that is renewed once if it breaks."""

    def __init__(self, where: ServerAddress, like: State, workers: int, timeout_s: float) -> None:
        self._where, self._like, self._workers = where, like, workers
        self._timeout_s = self._server_timeout_s = timeout_s
        self._connection: Connection | None = None
        self._last_sent = monotonic()
        self.reconnects = 0

    def join(self, rank: int, step: int) -> int:
        """Connects as a worker; returns the step that its next message must have.

        A worker that comes back waits until the server has noticed that its last connection is
        lost, which takes the timeout at most.
        """
        end = monotonic() + self._timeout_s
        while True:
            with _server_errors():
                kind, body = self._greet(rank, step)
            if kind == _ACCEPTED:
                return self._accepted(body)
            self._disconnect()
            if kind != _IN_USE or monotonic() > end:
                text = body.decode("ascii", "replace")
                raise PeerError(f"the server on worker 0 refuses worker {rank}: {text}")
            sleep(_RETRY_S)

    def sync(self, rank: int, step: int, message: torch.Tensor) -> Reply:
        request = _SYNC + _STEP.pack(step) + as_bytes(message)
        was_connected = self._connection is not None
        try:
            return self._request(request)
        except PeerTimeout:
            # The server exists and does not answer: another connection would not help.
            raise
        except PeerError as error:
            log.warning("worker %d connects to the server again: %s", rank, error)
        expected = self.join(rank, step)
        self.reconnects += 1
        if expected == step:
            return self._request(request)
        if expected == step + 1 and was_connected:
            # The message has been applied, and only its reply was lost.
            return self.fetch(rank)
        # After a sync that failed here the server may still have applied its message.
        self._disconnect()
        raise PeerError(
            f"the server expects message {expected} of worker {rank}, not {step}: rejoin with a "
            "new process"
        )

    def fetch(self, rank: int) -> Reply:
        return self._request(_FETCH)

    def ping(self, rank: int) -> None:
        """Shows the server that this worker still takes steps, a few times per timeout."""
        interval_s = min(self._timeout_s, self._server_timeout_s) / _PINGS_PER_TIMEOUT
        if self._connection is None or monotonic() - self._last_sent < interval_s:
            return
        try:
            self._send(_PING)
        except PeerError as error:
            # Not an error yet: the next sync connects again.
            log.warning("worker %d has lost its connection to the server: %s", rank, error)
            self._disconnect()

    def leave(self, rank: int, *, failed: bool = False) -> None:
        """Ends the connection; after an error without a message, so that the worker is lost."""
        try:
            if not failed:
                self._send(_LEAVE)
        except PeerError as error:
            # All syncs are done, so nothing is lost with the connection.
            log.warning("worker %d leaves without its connection to the server: %s", rank, error)
        finally:
            self._disconnect()

    def _greet(self, rank: int, step: int) -> tuple[bytes, bytearray]:
        self._connection = connect(self._where.address, self._where.token, self._timeout_s)
        try:
            self._send(_HELLO.pack(rank, step, self._where.settings))
            answer = self._connection.receive(_MAX_ANSWER_BYTES)
        except GradwireError:
            self._disconnect()
            raise
        return bytes(answer[:1]), answer[1:]

    def _accepted(self, body: bytearray) -> int:
        if len(body) != _WELCOME.size:
            self._disconnect()
            raise WireError(f"the server's answer has {len(body)} bytes, not {_WELCOME.size}")
        step, timeout_s = _WELCOME.unpack(body)
        if not 0 <= step < MAX_STEP or not 0 < timeout_s < float("inf"):
            self._disconnect()
            raise WireError(f"the server's answer has step {step} and timeout {timeout_s}")
        self._server_timeout_s = timeout_s
        return int(step)

    def _request(self, request: bytes) -> Reply:
        try:
            with _server_errors():
                self._send(request)
                assert self._connection is not None
                reply = self._connection.receive(1 + _dense_bytes(self._like))
            return _decode_reply(bytes(reply), self._like, self._workers)
        except NonFiniteError:
            raise
        except BaseException:
            # A reply that comes later would be taken for that of the next request.
            self._disconnect()
            raise

    def _send(self, data: bytes) -> None:
        if self._connection is None:
            raise PeerError("there is no connection")
        self._connection.send(data)
        self._last_sent = monotonic()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def serve(server: Server, connection: Connection, settings: bytes) -> None:
    """Answers one worker's requests until it leaves or is lost."""
    rank = _welcome(server, connection, settings)
    if rank is None:
        return
    try:
        while _answer(server, rank, connection):
            pass
        server.leave(rank)
    except Exception as error:
        # Whatever one worker sends must not affect the others.
        server.drop(rank, error)


def _welcome(server: Server, connection: Connection, settings: bytes) -> int | None:
    """Returns the rank as which a worker has connected, or None if it was refused."""
    try:
        data = connection.receive_handshake(_HELLO.size)
        if len(data) != _HELLO.size:
            raise WireError(f"a handshake of {len(data)} bytes, not {_HELLO.size}")
        rank, step, digest = _HELLO.unpack(data)
        if digest != settings:
            raise WireError(f"rank {rank} has other settings (method, parameters, world size ...)")
        expected = server.join(rank, step)
    except GradwireError as error:
        in_use = isinstance(error, RankInUse)
        if not in_use:
            log.warning("a connection with the token was refused: %s", error)
        kind = _IN_USE if in_use else _REFUSED
        text = str(error).encode("ascii", "replace")[: _MAX_ANSWER_BYTES - 1]
        _try_send(connection, kind + text)
        return None
    try:
        connection.send(_ACCEPTED + _WELCOME.pack(expected, connection.timeout_s))
    except PeerError as error:
        server.drop(rank, error)
        return None
    return int(rank)


def _answer(server: Server, rank: int, connection: Connection) -> bool:
    """Answers the next request of a worker; returns False if it leaves."""
    request = connection.receive(1 + _STEP.size + server.format.max_bytes())
    kind, body = bytes(request[:1]), request[1:]
    if kind == _SYNC and len(body) >= _STEP.size:
        (step,) = _STEP.unpack_from(body)
        try:
            reply = server.sync(rank, step, from_bytes(body[_STEP.size :]))
        except NonFiniteError:
            connection.send(_NONFINITE)
        else:
            connection.send(_encode_reply(reply))
    elif request == _FETCH:
        connection.send(_encode_reply(server.fetch(rank)))
    elif request not in (_PING, _LEAVE):
        raise WireError(f"a request of kind {kind!r} and {len(request)} bytes")
    return request != _LEAVE


def _try_send(connection: Connection, data: bytes) -> None:
    try:
        connection.send(data)
    except PeerError as error:
        log.debug("a refused worker is gone already: %s", error)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        text = f"the server on worker 0 is gone: {error}"
        raise type(error)(text) from error


def _dense_bytes(like: State) -> int:
    return 4 * sum(tensor.numel() for tensor in like.values())


def _encode_reply(reply: Reply) -> bytes:
    """Encodes a byte for the kind; then the model, or each update's message behind its header."""
    if isinstance(reply, dict):
        return _MODEL + b"".join(as_bytes(tensor) for tensor in reply.values())
    headers = [UPDATE_HEADER.pack(u.rank, u.step, u.weight, u.message.numel()) for u in reply]
    bodies = [as_bytes(update.message) for update in reply]
    return _UPDATES + b"".join(h + b for h, b in zip(headers, bodies, strict=True))


def _decode_reply(data: bytes, like: State, workers: int) -> Reply:
    """Decodes a reply of the server; raises WireError if it is malformed."""
    kind, body = data[:1], data[1:]
    if data == _NONFINITE:
        raise NonFiniteError("the server refused the update: its model would not be finite")
    if kind == _MODEL:
        return _decode_model(body, like)
    if kind != _UPDATES:
        raise WireError(f"the server sent a reply of kind {kind!r}")
    updates, offset = [], 0
    while offset < len(body):
        if len(body) - offset < UPDATE_HEADER.size:
            raise WireError(f"the server's reply ends in {len(body) - offset} bytes of a header")
        rank, step, weight, length = UPDATE_HEADER.unpack_from(body, offset)
        offset += UPDATE_HEADER.size
        if not 0 <= length <= len(body) - offset:
            raise WireError(f"a message of {length} bytes where {len(body) - offset} are left")
        valid_sender = 0 <= rank < workers and 0 <= step < MAX_STEP
        if not valid_sender or not (isfinite(weight) and 0 < weight <= 1):
            raise WireError(f"an update of rank {rank}, step {step} and weight {weight}")
        updates.append(Update(rank, step, weight, from_bytes(body[offset : offset + length])))
        offset += length
    return updates


def _decode_model(body: bytes, like: State) -> State:
    if len(body) != _dense_bytes(like):
        raise WireError(f"the server sent a model of {len(body)} bytes, not {_dense_bytes(like)}")
    pieces = from_bytes(body, torch.float32).split([tensor.numel() for tensor in like.values()])
    model = dict(zip(like, pieces, strict=True))
    name = nonfinite_name(model)
    if name is not None:
        raise WireError(f"the server sent a model in which {name!r} is not finite")
    return model
