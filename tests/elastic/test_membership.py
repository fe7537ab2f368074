"""Introductions: a format that does not change, and bytes of strangers."""

from hashlib import sha256

import pytest
import torch

from gradwire import WireError
from gradwire.elastic.membership import Introduction

CPU = torch.device("cpu")


def test_the_format_of_introductions_stays_as_it_is() -> None:
    """Replicas of other versions must be able to read it."""
    own = Introduction(bytes(range(16)), sha256(b"settings").digest(), joined=True, silent=False)
    message = bytes(own.encode(CPU).tolist())
    assert message == b"gradwire\x01" + bytes(range(16)) + own.digest + bytes(7)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_introductions_are_read_back(joined: bool, silent: bool) -> None:
    own = Introduction(b"r" * 16, b"d" * 32, joined, silent)
    assert Introduction.decode(0, own.encode(CPU)) == own


def test_a_stranger_is_named() -> None:
    with pytest.raises(WireError, match="replica 2 does not introduce itself"):
        Introduction.decode(2, torch.zeros(64, dtype=torch.uint8))
