"""Messages over TCP arrive whole, in order and in time, and only from clients with the token."""

import logging
import resource
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Queue
from threading import Thread
from threading import enumerate as all_threads

import pytest
import torch.distributed as dist

from deadlines import scaled
from gradwire.comm.tcp import (
    MAX_HANDSHAKES,
    Connection,
    Listener,
    PeerTimeout,
    connect,
    decode_address,
    encode_address,
    root_store,
)
from gradwire.errors import ConfigError, PeerError, WireError
from processes import Ranks

TOKEN = b"0123456789abcdef"
MOST_BYTES = 1 << 40


def echo(connection: Connection) -> None:
    while True:
        try:
            connection.send(bytes(connection.receive(MOST_BYTES)[::-1]))
        except PeerError:
            return


@contextmanager
def listening(timeout_s: float = 10.0) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN, echo, timeout_s)
    try:
        yield listener
    finally:
        listener.close()


def test_messages_arrive_whole_and_in_order() -> None:
    with listening() as listener:
        connection = connect(listener.address, TOKEN, 10)
        for message in (b"abc", b"", bytes(3_000_001), b"z" * 10):
            connection.send(message)
            assert connection.receive(MOST_BYTES) == message[::-1]
        connection.close()


@pytest.mark.parametrize("token", [b"0123456789abcdeX", b"", TOKEN + b"more"])
def test_a_client_without_the_token_is_not_served(
    token: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    served: Queue[Connection] = Queue()
    listener = Listener("127.0.0.1", TOKEN, served.put, 10)
    for _ in range(3):
        connection = connect(listener.address, token, 10)
        with pytest.raises(PeerError, match="the connection is lost"):
            connection.receive(MOST_BYTES)
        connection.close()
    assert served.empty()
    assert listener.refused == 3
    listener.close()
    assert [r.getMessage() for r in caplog.records] == [
        "a client was refused since it did not send the token (logged once)"
    ]


def test_a_lost_connection_is_noticed_by_the_other_side() -> None:
    seen: Queue[str] = Queue()

    def listen(connection: Connection) -> None:
        try:
            connection.receive(MOST_BYTES)
        except PeerError as error:
            seen.put(str(error))

    listener = Listener("127.0.0.1", TOKEN, listen, 10)
    connect(listener.address, TOKEN, 10).close()
    assert "the connection is lost" in seen.get(timeout=scaled(10))
    listener.close()


def test_a_message_over_the_limit_is_refused() -> None:
    with listening() as listener:
        connection = connect(listener.address, TOKEN, 10)
        connection.send(b"12345678")
        with pytest.raises(WireError, match="a message of 8 bytes, where 4 are the most"):
            connection.receive(max_bytes=4)
        connection.close()


def test_connecting_to_a_closed_listener_raises() -> None:
    with listening() as listener:
        address = listener.address
    with pytest.raises(PeerError, match=r"nobody answers at 127\.0\.0\.1"):
        connect(address, TOKEN, 10)


def test_listening_at_the_address_of_another_host_raises() -> None:
    with pytest.raises(ConfigError, match=r"host must be an address of this host, got '192\.0\.2"):
        Listener("192.0.2.1", TOKEN, echo, 1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has this option")
def test_a_message_to_a_vanished_host_times_out() -> None:
    """Keep-alive covers idle connections only; others would time out after a quarter hour."""
    with listening() as listener:
        connection = connect(listener.address, TOKEN, 10)
        patience_ms = connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 10_000 <= patience_ms <= 60_000
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    """A raw socket, and the connection at its other end with a timeout of 0.3 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    connection = Connection(accepted, 0.3)
    yield raw, connection
    raw.close()
    connection.close()


def seconds_until_timeout(receive: object, *args: object) -> float:
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"no complete message in time \(timeout 0\.3 s\)"):
        receive(*args)  # type: ignore[operator]
    return time.monotonic() - start


@pytest.mark.parametrize("sent", [b"", b"\1", struct.pack("<q", 100), struct.pack("<q", 9) + b"x"])
def test_a_message_that_does_not_arrive_times_out(
    pair: tuple[socket.socket, Connection], sent: bytes
) -> None:
    raw, connection = pair
    raw.sendall(sent)
    assert 0.25 < seconds_until_timeout(connection.receive, 100) < scaled(1)


@pytest.mark.parametrize("at_once", [0, 8])
def test_a_message_byte_by_byte_times_out(
    pair: tuple[socket.socket, Connection], at_once: int
) -> None:
    """Each byte arrives in time, but not the message: its length, or its content."""
    raw, connection = pair
    data = struct.pack("<q", 100) + bytes(100)
    raw.sendall(data[:at_once])

    def trickle() -> None:
        with suppress(OSError):
            for byte in data[at_once:]:
                time.sleep(0.1)
                raw.send(bytes([byte]))

    thread = Thread(target=trickle)
    thread.start()
    assert 0.25 < seconds_until_timeout(connection.receive, 100) < scaled(1)
    connection.close()
    thread.join()


def test_a_receiver_that_does_not_read_times_out(pair: tuple[socket.socket, Connection]) -> None:
    _, connection = pair
    assert 0.25 < seconds_until_timeout(connection.send, bytes(50_000_000)) < scaled(2)


def test_an_announced_length_reserves_no_memory(pair: tuple[socket.socket, Connection]) -> None:
    raw, connection = pair
    raw.sendall(struct.pack("<q", 1 << 30) + bytes(25))
    tracemalloc.start()
    seconds_until_timeout(connection.receive, 1 << 30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_silent_clients_are_disconnected_and_do_not_delay_others() -> None:
    with listening(timeout_s=0.5) as listener, ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(listener.address))
            for _ in range(MAX_HANDSHAKES // 2)
        ]
        clients[0].sendall(struct.pack("<q", 16) + TOKEN[:5])
        start = time.monotonic()
        connection = connect(listener.address, TOKEN, 10)
        connection.send(b"abc")
        assert connection.receive(3) == b"cba"
        assert time.monotonic() - start < scaled(0.4)
        connection.close()
        for client in clients:
            client.settimeout(scaled(3))
            assert client.recv(1) == b""
        assert time.monotonic() - start < scaled(2)


def test_a_listener_ends_its_threads_and_connections() -> None:
    before = set(all_threads())
    with listening() as listener:
        connection = connect(listener.address, TOKEN, 10)
        connection.send(b"abc")
        assert connection.receive(3) == b"cba"
        start = time.monotonic()
    assert time.monotonic() - start < scaled(2)
    assert set(all_threads()) == before
    with pytest.raises(PeerError, match="the connection is lost"):
        connection.receive(1)
    connection.close()


def without_files() -> object:
    """Rank 0 listens and has no file descriptor left when rank 1 connects."""
    store = root_store()
    if dist.get_rank() == 1:
        address, token = decode_address(store.get("tcp test"))
        # A waiting accept already has a descriptor, so that the first may be served at once.
        connections = [connect(address, token, 10) for _ in range(3)]
        store.set("tcp test connected", "")
        answers = []
        for connection in connections:
            connection.send(b"abc")
            answers.append(bytes(connection.receive(3)))
            connection.close()
        store.set("tcp test answered", "")
        return answers
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening() as listener, ExitStack() as files:
        with suppress(OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            while True:
                files.enter_context(socket.socket())
        try:
            store.set("tcp test", encode_address(listener.address, TOKEN))
            store.wait(["tcp test connected"])
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            files.close()
        store.wait(["tcp test answered"])
    logging.getLogger("gradwire").removeHandler(handler)
    return lines


def test_a_listener_without_file_descriptors_accepts_later(two_ranks: Ranks) -> None:
    lines, answers = two_ranks.run(without_files, timeout_s=20)
    assert answers == [b"cba"] * 3
    [line] = lines
    assert "cannot accept connections for now" in line
    assert "Too many open files" in line


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'["h", 1, "xyz"]', b"[" * 99_999])
def test_an_address_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="the server's address cannot be read"):
        decode_address(data)
    good = encode_address(("10.0.0.1", 80), TOKEN)
    assert decode_address(good.encode()) == (("10.0.0.1", 80), TOKEN)
