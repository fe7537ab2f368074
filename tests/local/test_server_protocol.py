"""Letters between workers and a server far away: read as they were written, or refused."""

import random
import struct

import pytest
import torch

from gradwire.comm.tcp import PostOffice, connect
from gradwire.errors import PeerError, WireError
from gradwire.local.server import Said
from gradwire.local.server_protocol import _SAID, Correspondence, _read_news, _write_news

LIKE = {"a": torch.arange(5.0), "b": torch.arange(3.0) - 7}
NEWS = [
    Said(2, 9, 0.25, torch.arange(40, dtype=torch.uint8)),
    Said(0, 4, 0.5, torch.empty(0, dtype=torch.uint8)),
    Said(1, 1 << 40, 1 / 3, torch.full((7,), 255, dtype=torch.uint8)),
]


def test_messages_come_as_they_were_written() -> None:
    read = _read_news(_write_news(NEWS), LIKE)
    assert isinstance(read, list)
    for one, other in zip(read, NEWS, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one.message, other.message)
    assert _read_news(_write_news([]), LIKE) == []


def test_a_model_comes_as_it_was_written() -> None:
    read = _read_news(_write_news(LIKE), LIKE)
    assert isinstance(read, dict)
    assert all(torch.equal(read[name], LIKE[name]) for name in LIKE)


@pytest.mark.parametrize("length", [-_SAID.size, -1, 41, 1 << 40, -(1 << 62)])
def test_a_length_that_is_none(length: int) -> None:
    """One of them would have the reader go back and read the same head for ever."""
    letter = b"\0" + struct.pack("<iqdq", 2, 9, 0.25, length) + bytes(40)
    with pytest.raises(WireError, match=f"a message of {length} bytes where 40 are left"):
        _read_news(letter, LIKE)


@pytest.mark.parametrize("letter", [b"", b"\2abc", b"\1abc", b"\0abc"])
def test_what_is_no_letter(letter: bytes) -> None:
    with pytest.raises(WireError, match="the server"):
        _read_news(letter, LIKE)


def test_hostile_letters_are_read_or_refused() -> None:
    dice, counts = random.Random(0), [0, 0]
    for number in range(20_000):
        letter = bytearray(_write_news(NEWS if number % 2 else LIKE))
        for _ in range(dice.randint(1, 4)):
            letter[dice.randrange(len(letter))] ^= 1 << dice.randrange(8)
        if number % 3 == 0:
            del letter[dice.randrange(len(letter)) :]
        try:
            _read_news(bytes(letter), LIKE)
            counts[0] += 1
        except WireError:
            counts[1] += 1
    assert min(counts) > 1000


def test_a_server_that_is_gone_is_named() -> None:
    office = PostOffice("127.0.0.1", b"token", lambda box: None)
    counter = Correspondence(connect(office.address, b"token"), 1, LIKE)
    with pytest.raises(PeerError, match="the server beside worker 0 is gone: the connection"):
        counter.visit(1, 0, torch.zeros(4, dtype=torch.uint8))
    office.close()
    counter._box.close()
