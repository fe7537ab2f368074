"""Letters over TCP: whole and in order from those who know the token, or not at all."""

import socket
from queue import Queue

import pytest

from gradwire.comm.tcp import Mailbox, PostOffice, connect
from gradwire.errors import PeerError

TOKEN = b"0123456789abcdef"


def echo(box: Mailbox) -> None:
    while True:
        box.send(box.receive()[::-1])


def test_letters_arrive_whole_and_in_order() -> None:
    office = PostOffice("127.0.0.1", TOKEN, echo)
    box = connect(office.address, TOKEN)
    for letter in (b"abc", b"", bytes(3_000_001), b"z" * 10):
        box.send(letter)
        assert box.receive() == letter[::-1]
    box.close()
    office.close()


@pytest.mark.parametrize("token", [b"0123456789abcdeX", b"", TOKEN + b"more"])
def test_who_does_not_know_the_token_is_not_served(token: bytes) -> None:
    served: Queue[Mailbox] = Queue()
    office = PostOffice("127.0.0.1", TOKEN, served.put)
    box = connect(office.address, token)
    with pytest.raises(PeerError, match="the connection is lost"):
        box.receive()
    box.close()
    assert served.empty()
    office.close()


def test_a_lost_connection_is_seen_by_the_other_side() -> None:
    seen: Queue[str] = Queue()

    def listen(box: Mailbox) -> None:
        try:
            box.receive()
        except PeerError as error:
            seen.put(str(error))

    office = PostOffice("127.0.0.1", TOKEN, listen)
    connect(office.address, TOKEN).close()
    assert "the connection is lost" in seen.get(timeout=10)
    office.close()


def test_a_letter_longer_than_agreed() -> None:
    office = PostOffice("127.0.0.1", TOKEN, echo)
    box = connect(office.address, TOKEN)
    box.send(b"12345678")
    with pytest.raises(PeerError, match="a letter of 8 bytes, where 4 are the most"):
        box.receive(longest=4)
    box.close()
    office.close()


def test_nobody_there() -> None:
    office = PostOffice("127.0.0.1", TOKEN, echo)
    office.close()
    with pytest.raises(PeerError, match=r"nobody answers at 127\.0\.0\.1"):
        connect(office.address, TOKEN)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has this option")
def test_a_letter_to_a_host_that_has_vanished_is_given_up() -> None:
    """Keep-alive looks after idle connections; others would be given up after a quarter hour."""
    office = PostOffice("127.0.0.1", TOKEN, echo)
    box = connect(office.address, TOKEN)
    patience_ms = box._wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 10_000 <= patience_ms <= 60_000
    assert box._wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    box.close()
    office.close()
