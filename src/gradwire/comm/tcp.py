"""Messages between two processes over TCP, for exchanges that do not wait for all ranks.

A collective needs every rank at the same time; a message needs its two. A broken connection is
noticed by the other side at once, whereas a collective's timeout would take minutes.
"""

import hmac
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch.distributed as dist

from gradwire.errors import ConfigError, PeerError

_LENGTH = struct.Struct("<q")
_KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    # In ms, for messages under way, which keep-alive does not cover.
    "TCP_USER_TIMEOUT": 30_000,
}
"""Detects a host that vanished silently within half a minute, where the system supports it."""

MAX_BYTES = 1 << 40


class Connection:
    """One end of a connection: messages of bytes, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise PeerError(f"the connection is lost: {error}") from error

    def receive(self, max_bytes: int = MAX_BYTES) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if not 0 <= length <= max_bytes:
            raise PeerError(f"a message of {length} bytes, where {max_bytes} are the most")
        return self._receive_exactly(length)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, done = memoryview(data), 0
        try:
            while done < count:
                got = self._socket.recv_into(view[done:])
                if not got:
                    raise PeerError("the connection is lost: the other side has closed it")
                done += got
        except OSError as error:
            raise PeerError(f"the connection is lost: {error}") from error
        return bytes(data)


class Listener:
    """Listens at a free port of a host; every client that sends the token is served in a thread."""

    def __init__(self, host: str, token: bytes, serve: Callable[[Connection], None]) -> None:
        self._token, self._serve = token, serve
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._start(self._accept)

    def close(self) -> None:
        # Closing alone does not wake the thread that waits in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        # accept raises OSError once the socket is closed, which ends this thread.
        with suppress(OSError):
            while True:
                sock, _ = self._socket.accept()
                self._start(lambda sock=sock: self._authenticate(sock))  # type: ignore[misc]

    def _authenticate(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        with suppress(PeerError):
            if hmac.compare_digest(connection.receive(len(self._token)), self._token):
                self._serve(connection)
        connection.close()

    def _start(self, work: Callable[[], None]) -> None:
        Thread(target=work, name="gradwire-tcp", daemon=True).start()


def connect(address: tuple[str, int], token: bytes) -> Connection:
    """Connects to a `Listener`; raises PeerError if it cannot be reached."""
    try:
        connection = Connection(socket.create_connection(address, timeout=60))
        connection._socket.settimeout(None)
    except OSError as error:
        raise PeerError(f"nobody answers at {address[0]}:{address[1]}: {error}") from error
    connection.send(token)
    return connection


def own_host() -> str:
    """Returns the address by which this host reaches the store of the process group."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ConfigError("the process group has no TCP store to find an address by; give host=...")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connect only makes the system choose the address it would send from.
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])
