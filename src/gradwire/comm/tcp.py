"""Letters between two processes over TCP, for those who do not wait for all others.

Collectives need every rank at the same time; a letter needs its two. A connection that breaks is
seen by the other side, which a collective's timeout would take minutes for.
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
_VIGILANCE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    # In ms, and for letters under way, which keep-alive does not look after.
    "TCP_USER_TIMEOUT": 30_000,
}
"""A host that has vanished without a word is noticed within half a minute, where TCP can tell."""

LONGEST = 1 << 40


class Mailbox:
    """One end of a connection: letters of bytes, in order."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VIGILANCE.items():
            option = getattr(socket, name, None)
            if option is not None:
                wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, letter: bytes) -> None:
        try:
            self._wire.sendall(_LENGTH.pack(len(letter)) + letter)
        except OSError as error:
            raise PeerError(f"the connection is lost: {error}") from error

    def receive(self, longest: int = LONGEST) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 <= length <= longest:
            raise PeerError(f"a letter of {length} bytes, where {longest} are the most")
        return self._exactly(length)

    def close(self) -> None:
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, done = memoryview(data), 0
        try:
            while done < count:
                got = self._wire.recv_into(view[done:])
                if not got:
                    raise PeerError("the connection is lost: the other side has closed it")
                done += got
        except OSError as error:
            raise PeerError(f"the connection is lost: {error}") from error
        return bytes(data)


class PostOffice:
    """Listens at a host's free port; everyone who knows the token gets a thread of its own."""

    def __init__(self, host: str, token: bytes, serve: Callable[[Mailbox], None]) -> None:
        self._token, self._serve = token, serve
        self._door = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._door.getsockname()[:2]
        self._start(self._accept)

    def close(self) -> None:
        # Closing alone does not wake the thread that waits at the door.
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        # A door that was closed lets nobody in and ends this.
        with suppress(OSError):
            while True:
                wire, _ = self._door.accept()
                self._start(lambda wire=wire: self._welcome(wire))  # type: ignore[misc]

    def _welcome(self, wire: socket.socket) -> None:
        box = Mailbox(wire)
        with suppress(PeerError):
            if hmac.compare_digest(box.receive(len(self._token)), self._token):
                self._serve(box)
        box.close()

    def _start(self, work: Callable[[], None]) -> None:
        Thread(target=work, name="gradwire-post", daemon=True).start()


def connect(address: tuple[str, int], token: bytes) -> Mailbox:
    try:
        box = Mailbox(socket.create_connection(address, timeout=60))
        box._wire.settimeout(None)
    except OSError as error:
        raise PeerError(f"nobody answers at {address[0]}:{address[1]}: {error}") from error
    box.send(token)
    return box


def own_host() -> str:
    """The address by which this host reaches the store of the process group."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ConfigError("the process group has no TCP store to find an address by; give host=...")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system only says which of its addresses it would send from.
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])
