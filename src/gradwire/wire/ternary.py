"""Numbers of {-1, 0, 1}, five to a byte: 1.6 bits each, where log2(3) = 1.585 is the least."""

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.reference.ternary import PER_BYTE, pack_trits, unpack_trits

__all__ = ["ALL_ZERO", "LARGEST", "check_trits", "pack_trits", "packed_trits", "unpack_trits"]

LARGEST = 3**PER_BYTE - 1
"""Of 256 values a byte has 13 to spare."""
ALL_ZERO = LARGEST // 2
"""The byte that says five zeros."""


def packed_trits(count: int) -> int:
    """Bytes that `count` trits take."""
    return -(-count // PER_BYTE)


def check_trits(packed: Tensor) -> None:
    """Raises WireError where a byte is none that `pack_trits` writes."""
    fits = (packed <= LARGEST).all()
    if packed.is_cuda:
        # The host does not wait for the card; a bad message stops the card instead.
        torch._assert_async(fits, "gradwire: a message has a byte that is no five trits")
    elif not fits:
        raise WireError(f"message has a byte above {LARGEST}, which is no five trits")
