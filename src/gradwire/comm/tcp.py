"""Messages between two processes over TCP, for exchanges that do not wait for all ranks.

A collective needs every rank at the same time; a message needs its two. A broken connection is
noticed by the other side at once, whereas a collective's timeout would take minutes. Every wait has
a deadline, and a receiver's memory grows only with the bytes that have arrived.
"""

import hmac
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Semaphore, Thread
from time import monotonic

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradwire.errors import ConfigError, GradwireError, PeerError, WireError

log = logging.getLogger("gradwire")

_LENGTH = struct.Struct("<q")
_KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    # In ms, for messages under way, which keep-alive does not cover.
    "TCP_USER_TIMEOUT": 30_000,
}
"""Detects a host that vanished silently within half a minute, where the system supports it."""

HANDSHAKE_TIMEOUT_S = 10.0
"""A client that has not sent the token by then is disconnected, or earlier if the timeout is."""

MIN_BYTES_PER_S = 100_000
"""A message may take the timeout, and the time that its bytes take at this rate."""

MAX_HANDSHAKES = 64
"""The most clients without a token at a time; others wait in the system's queue."""

_CHUNK_BYTES = 1 << 18
_PAUSES_S = (0.01, 1.0)
"""Shortest and longest pause after a failed accept."""


class PeerTimeout(PeerError):
    """The other side has not answered in time, though the connection exists."""


class Connection:
    """One end of a connection: messages of bytes, in order.

    A wait for the other side ends after `timeout_s` with PeerTimeout. A whole message may take
    longer, by what its bytes take at MIN_BYTES_PER_S.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket, self.timeout_s = sock, timeout_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: bytes) -> None:
        data = memoryview(_LENGTH.pack(len(message)) + message)
        end, done = self._deadline(len(data)), 0
        while done < len(data):
            with self._waiting(end):
                done += self._socket.send(data[done:])

    def receive(self, max_bytes: int, within_s: float | None = None) -> bytearray:
        """Returns the next message, which has arrived `within_s` seconds from now if that is given.

        Raises WireError if its announced length exceeds `max_bytes`.
        """
        end = monotonic() + (self.timeout_s if within_s is None else within_s)
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, end))
        if not 0 <= length <= max_bytes:
            raise WireError(f"a message of {length} bytes, where {max_bytes} are the most")
        return self._receive_exactly(length, self._deadline(length) if within_s is None else end)

    def receive_handshake(self, max_bytes: int) -> bytearray:
        """Returns the next message of a client that is not known yet, which has less time."""
        return self.receive(max_bytes, min(HANDSHAKE_TIMEOUT_S, self.timeout_s))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_exactly(self, count: int, end: float) -> bytearray:
        data = bytearray()
        while len(data) < count:
            with self._waiting(end):
                # Not one buffer of `count` bytes: a peer could reserve memory and send nothing.
                chunk = self._socket.recv(min(count - len(data), _CHUNK_BYTES))
            if not chunk:
                raise PeerError("the connection is lost: the other side has closed it")
            data += chunk
        return data

    def _deadline(self, nbytes: int) -> float:
        return monotonic() + self.timeout_s + nbytes / MIN_BYTES_PER_S

    @contextmanager
    def _waiting(self, end: float) -> Iterator[None]:
        """Lets the socket block until `end`, and for the timeout at most."""
        left_s = min(self.timeout_s, end - monotonic())
        try:
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            yield
        except OSError as error:
            # The system's own timeouts have a number, and end the connection.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise PeerTimeout(
                    f"no complete message in time (timeout {self.timeout_s:g} s)"
                ) from None
            raise PeerError(f"the connection is lost: {error}") from error


class Listener:
    """Listens at a free port of a host; every client that sends the token is served in a thread.

    Other clients are disconnected, after HANDSHAKE_TIMEOUT_S at the latest. If the system cannot
    accept a client (too many open files), later ones are still accepted.
    """

    def __init__(
        self, host: str, token: bytes, serve: Callable[[Connection], None], timeout_s: float
    ) -> None:
        self._token, self._serve, self._timeout_s = token, serve, timeout_s
        try:
            self._socket = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(
                f"host must be an address of this host, got {host!r}: {error}"
            ) from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.refused = 0
        """Clients that did not send the token."""
        self._closed, self._lock = Event(), Lock()
        self._handshakes = Semaphore(MAX_HANDSHAKES)
        self._open: dict[Connection, Thread] = {}
        self._logged: set[str] = set()
        self._acceptor = Thread(target=self._accept, name="gradwire-tcp", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Closes all connections, and waits for their threads, at most for the timeout."""
        self._closed.set()
        # Closing alone does not wake the thread that waits in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            threads = [self._acceptor, *self._open.values()]
            for connection in self._open:
                connection.close()
        end = monotonic() + self._timeout_s
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))

    def _accept(self) -> None:
        shortest_s, longest_s = _PAUSES_S
        pause_s = shortest_s
        while not self._closed.is_set():
            self._handshakes.acquire()
            try:
                self._accept_one()
                pause_s = shortest_s
            except (OSError, RuntimeError) as error:
                # RuntimeError: no thread can be started.
                self._handshakes.release()
                if not self._closed.is_set():
                    self._log_once(f"cannot accept connections for now: {error}")
                    self._closed.wait(pause_s)
                    pause_s = min(2 * pause_s, longest_s)

    def _accept_one(self) -> None:
        sock, _ = self._socket.accept()
        try:
            connection = Connection(sock, self._timeout_s)
            thread = Thread(
                target=self._handle, args=(connection,), name="gradwire-tcp", daemon=True
            )
            with self._lock:
                if self._closed.is_set():
                    raise ConnectionAbortedError("the listener is closed")
                thread.start()
                self._open[connection] = thread
        except (OSError, RuntimeError):
            sock.close()
            raise

    def _handle(self, connection: Connection) -> None:
        try:
            if self._is_authentic(connection):
                self._serve(connection)
        finally:
            connection.close()
            with self._lock:
                self._open.pop(connection, None)

    def _is_authentic(self, connection: Connection) -> bool:
        try:
            token = connection.receive_handshake(len(self._token))
            reason = "" if hmac.compare_digest(token, self._token) else "a wrong token"
        except GradwireError as error:
            reason = str(error)
        finally:
            self._handshakes.release()
        if reason and not self._closed.is_set():
            self.refused += 1
            # Without its address or bytes: any client of the network can cause this line.
            self._log_once("a client was refused since it did not send the token")
        return not reason

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s (logged once)", text)


def connect(address: tuple[str, int], token: bytes, timeout_s: float) -> Connection:
    """Connects to a `Listener`; raises PeerError if it cannot be reached within the timeout."""
    try:
        connection = Connection(socket.create_connection(address, timeout=timeout_s), timeout_s)
    except OSError as error:
        raise PeerError(f"nobody answers at {address[0]}:{address[1]}: {error}") from error
    try:
        connection.send(token)
    except PeerError:
        connection.close()
        raise
    return connection


def root_store() -> Store:
    """Returns the store of the process group, without the prefixes of groups."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def own_host() -> str:
    """Returns the address by which this host reaches the store of the process group."""
    store = root_store()
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ConfigError("the process group has no TCP store to find an address by; give host=...")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connect only makes the system choose the address it would send from.
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])


def encode_address(address: tuple[str, int], token: bytes) -> str:
    """Encodes the address of a `Listener` and its token, for those who may connect."""
    return json.dumps([*address, token.hex()])


def decode_address(data: bytes) -> tuple[tuple[str, int], bytes]:
    """Returns address and token; raises WireError if the bytes are neither."""
    try:
        host, port, key = json.loads(data)
        return (str(host), int(port)), bytes.fromhex(key)
    except (ValueError, TypeError, RecursionError) as error:
        # Not the bytes, which may hold the token.
        raise WireError(f"the server's address cannot be read ({type(error).__name__})") from None
