"""Messages between workers and a remote server: decoded as encoded, or refused."""

import random
import struct

import pytest
import torch

from gradwire.comm.tcp import Listener, connect
from gradwire.errors import PeerError, WireError
from gradwire.local.server import Update
from gradwire.local.server_protocol import (
    _UPDATE_HEADER,
    RemoteServer,
    _decode_reply,
    _encode_reply,
)

LIKE = {"a": torch.arange(5.0), "b": torch.arange(3.0) - 7}
UPDATES = [
    Update(2, 9, 0.25, torch.arange(40, dtype=torch.uint8)),
    Update(0, 4, 0.5, torch.empty(0, dtype=torch.uint8)),
    Update(1, 1 << 40, 1 / 3, torch.full((7,), 255, dtype=torch.uint8)),
]


def test_updates_are_decoded_as_encoded() -> None:
    read = _decode_reply(_encode_reply(UPDATES), LIKE)
    assert isinstance(read, list)
    for one, other in zip(read, UPDATES, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one.message, other.message)
    assert _decode_reply(_encode_reply([]), LIKE) == []


def test_a_model_is_decoded_as_encoded() -> None:
    read = _decode_reply(_encode_reply(LIKE), LIKE)
    assert isinstance(read, dict)
    assert all(torch.equal(read[name], LIKE[name]) for name in LIKE)


@pytest.mark.parametrize("length", [-_UPDATE_HEADER.size, -1, 41, 1 << 40, -(1 << 62)])
def test_invalid_lengths_are_refused(length: int) -> None:
    """One of them would make the decoder read the same header forever."""
    data = b"\0" + struct.pack("<iqdq", 2, 9, 0.25, length) + bytes(40)
    with pytest.raises(WireError, match=f"a message of {length} bytes where 40 are left"):
        _decode_reply(data, LIKE)


@pytest.mark.parametrize("data", [b"", b"\2abc", b"\1abc", b"\0abc"])
def test_invalid_replies_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="the server"):
        _decode_reply(data, LIKE)


def test_hostile_replies_are_decoded_or_refused() -> None:
    rng, counts = random.Random(0), [0, 0]
    for number in range(20_000):
        data = bytearray(_encode_reply(UPDATES if number % 2 else LIKE))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if number % 3 == 0:
            del data[rng.randrange(len(data)) :]
        try:
            _decode_reply(bytes(data), LIKE)
            counts[0] += 1
        except WireError:
            counts[1] += 1
    assert min(counts) > 1000


def test_a_server_that_is_gone_is_named() -> None:
    listener = Listener("127.0.0.1", b"token", lambda connection: None)
    remote = RemoteServer(connect(listener.address, b"token"), 1, LIKE)
    with pytest.raises(PeerError, match="the server on worker 0 is gone: the connection"):
        remote.sync(1, 0, torch.zeros(4, dtype=torch.uint8))
    listener.close()
    remote._connection.close()
