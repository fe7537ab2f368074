"""Ternary numbers, five per byte: 1.6 bits each, while log2(3) = 1.585 is the minimum."""

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.reference.ternary import PER_BYTE, pack_trits, unpack_trits

__all__ = ["ALL_ZERO", "LARGEST", "check_trits", "pack_trits", "packed_trits", "unpack_trits"]

LARGEST = 3**PER_BYTE - 1
"""The largest valid byte; 13 of the 256 values are unused."""
ALL_ZERO = LARGEST // 2
"""The byte of five zeros."""


def packed_trits(count: int) -> int:
    """Returns the bytes that `count` trits take."""
    return -(-count // PER_BYTE)


def check_trits(packed: Tensor) -> None:
    """Raises WireError if `pack_trits` never writes one of these bytes."""
    fits = (packed <= LARGEST).all()
    if packed.is_cuda:
        # The host does not wait for the GPU; an invalid message raises on the device instead.
        torch._assert_async(fits, "gradwire: a message has a byte that encodes no five trits")
    elif not fits:
        raise WireError(f"message has a byte above {LARGEST}, which encodes no five trits")
