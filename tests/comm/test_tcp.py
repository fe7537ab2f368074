"""Messages over TCP arrive whole and in order, and only from clients that know the token."""

import socket
from queue import Queue

import pytest

from gradwire.comm.tcp import Connection, Listener, connect
from gradwire.errors import PeerError

TOKEN = b"0123456789abcdef"


def echo(connection: Connection) -> None:
    while True:
        connection.send(connection.receive()[::-1])


def test_messages_arrive_whole_and_in_order() -> None:
    listener = Listener("127.0.0.1", TOKEN, echo)
    connection = connect(listener.address, TOKEN)
    for message in (b"abc", b"", bytes(3_000_001), b"z" * 10):
        connection.send(message)
        assert connection.receive() == message[::-1]
    connection.close()
    listener.close()


@pytest.mark.parametrize("token", [b"0123456789abcdeX", b"", TOKEN + b"more"])
def test_a_client_without_the_token_is_not_served(token: bytes) -> None:
    served: Queue[Connection] = Queue()
    listener = Listener("127.0.0.1", TOKEN, served.put)
    connection = connect(listener.address, token)
    with pytest.raises(PeerError, match="the connection is lost"):
        connection.receive()
    connection.close()
    assert served.empty()
    listener.close()


def test_a_lost_connection_is_noticed_by_the_other_side() -> None:
    seen: Queue[str] = Queue()

    def listen(connection: Connection) -> None:
        try:
            connection.receive()
        except PeerError as error:
            seen.put(str(error))

    listener = Listener("127.0.0.1", TOKEN, listen)
    connect(listener.address, TOKEN).close()
    assert "the connection is lost" in seen.get(timeout=10)
    listener.close()


def test_a_message_over_the_limit_is_refused() -> None:
    listener = Listener("127.0.0.1", TOKEN, echo)
    connection = connect(listener.address, TOKEN)
    connection.send(b"12345678")
    with pytest.raises(PeerError, match="a message of 8 bytes, where 4 are the most"):
        connection.receive(max_bytes=4)
    connection.close()
    listener.close()


def test_connecting_to_a_closed_listener_raises() -> None:
    listener = Listener("127.0.0.1", TOKEN, echo)
    listener.close()
    with pytest.raises(PeerError, match=r"nobody answers at 127\.0\.0\.1"):
        connect(listener.address, TOKEN)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has this option")
def test_a_message_to_a_vanished_host_times_out() -> None:
    """Keep-alive covers idle connections only; others would time out after a quarter hour."""
    listener = Listener("127.0.0.1", TOKEN, echo)
    connection = connect(listener.address, TOKEN)
    patience_ms = connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 10_000 <= patience_ms <= 60_000
    assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    connection.close()
    listener.close()
