"""Trits packed five per byte; invalid bytes are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import WireError
from gradwire.wire.ternary import ALL_ZERO, check_trits, pack_trits, packed_trits, unpack_trits


def test_by_hand() -> None:
    """The first trit is the lowest digit: 0 + 1*3 + 2*9 + 1*27 + 1*81, then 2 and four zeros."""
    packed = pack_trits(torch.tensor([-1, 0, 1, 0, 0, 1]))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [129, 2 + 3 + 9 + 27 + 81]


def test_zeros_are_one_byte_in_five() -> None:
    assert pack_trits(torch.zeros(12)).tolist() == [ALL_ZERO] * 3


@settings(deadline=None)
@given(trits=st.lists(st.integers(-1, 1), max_size=99))
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32], ids=str)
def test_round_trip(dtype: torch.dtype, trits: list[int]) -> None:
    packed = pack_trits(torch.tensor(trits, dtype=dtype))
    assert packed.numel() == packed_trits(len(trits))
    check_trits(packed)
    assert unpack_trits(packed, len(trits)).tolist() == trits


def test_all_243_bytes_round_trip() -> None:
    every = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * 5).view(-1)
    packed = pack_trits(every)
    assert packed.unique().tolist() == list(range(243))
    assert torch.equal(unpack_trits(packed, every.numel()).long(), every)


@pytest.mark.parametrize("byte", range(243, 256))
def test_other_bytes_are_refused(byte: int) -> None:
    with pytest.raises(WireError, match="byte above 242, which encodes no five trits"):
        check_trits(torch.tensor([0, byte, 242], dtype=torch.uint8))
