"""Numbers of {-1, 0, 1}, five to a byte: 1.6 bits each, where log2(3) = 1.585 is the least."""

import torch
from torch import Tensor

from laconic.errors import WireError

PER_BYTE = 5
LARGEST = 3**PER_BYTE - 1
"""Of 256 values a byte has 13 to spare."""
ALL_ZERO = LARGEST // 2
"""The byte that says five zeros."""


def packed_trits(count: int) -> int:
    """Bytes that `count` trits take."""
    return -(-count // PER_BYTE)


def pack_trits(trits: Tensor) -> Tensor:
    """Numbers of {-1, 0, 1} as uint8: each plus one is a digit of base 3, the first the lowest.

    A last byte that is not full is filled with zeros.
    """
    padded = packed_trits(trits.numel()) * PER_BYTE
    digits = torch.ones(padded, dtype=torch.uint8, device=trits.device)
    digits[: trits.numel()] = trits + 1
    columns = digits.view(-1, PER_BYTE).unbind(1)
    packed = columns[-1]
    for column in reversed(columns[:-1]):
        packed = packed * 3 + column
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """The first `count` trits again, as int8; any byte is read as some five of them."""
    rest = packed
    digits = torch.empty(packed.numel(), PER_BYTE, dtype=torch.int8, device=packed.device)
    for column in range(PER_BYTE):
        digits[:, column] = rest % 3
        rest = rest // 3
    return digits.view(-1)[:count] - 1


def check_trits(packed: Tensor) -> None:
    """Raises WireError where a byte is none that `pack_trits` writes."""
    fits = (packed <= LARGEST).all()
    if packed.is_cuda:
        # The host does not wait for the card; a bad message stops the card instead.
        torch._assert_async(fits, "laconic: a message has a byte that is no five trits")
    elif not fits:
        raise WireError(f"message has a byte above {LARGEST}, which is no five trits")
