"""Ascending positions as a bitmap of blocks and packed low bits (the format: wire/indices.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.bits import pack_bits, unpack_bits
from laconic.kernels.cpu.jit import compiled


@compiled
def _mark(index: NDArray[np.int64], low: int, bitmap: NDArray[np.uint8]) -> None:
    for i in range(index.size):
        place = (index[i] >> low) + i
        bitmap[place >> 3] |= np.uint8(1 << (place & 7))


@compiled
def _blocks(
    bitmap: NDArray[np.uint8], low: int, bits: NDArray[np.uint8], out: NDArray[np.int64]
) -> None:
    """Writes the starts of the blocks that the set bits tell; there are exactly `out.size`."""
    found = 0
    for byte in range(bitmap.size):
        value = bitmap[byte]
        while value:
            out[found] = (byte * 8 + bits[value] - found) << low
            value &= value - np.uint8(1)
            found += 1


@compiled
def _count(bitmap: NDArray[np.uint8], ones: NDArray[np.uint8]) -> int:
    total = 0
    for value in bitmap:
        total += ones[value]
    return total


@compiled
def _in_last_block(bitmap: NDArray[np.uint8], bitmap_bits: int, count: int, last: int) -> int:
    """How many of `count` positions lie in block number `last`; -1 if any lies beyond."""
    found = 0
    for place in range(bitmap_bits - 1, -1, -1):
        if bitmap[place >> 3] >> (place & 7) & 1:
            block = place - (count - 1 - found)
            if block > last:
                return -1
            if block < last:
                return found
            found += 1
    return found


# Of every byte: how many bits are set, and which is the first.
_ONES = np.array([value.bit_count() for value in range(256)], dtype=np.uint8)
_FIRST = np.array([(v & -v).bit_length() - 1 if v else 0 for v in range(256)], dtype=np.uint8)


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    out = torch.zeros(border + -(-index.numel() * low // 8), dtype=torch.uint8)
    _mark(index.numpy(), low, out[:border].numpy())
    out[border:] = pack_bits(index & ((1 << low) - 1), low)
    return out


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    out = torch.empty(count, dtype=torch.int64)
    _blocks(packed[:border].numpy(), low, _FIRST, out.numpy())
    if low:
        out |= unpack_bits(packed[border:], low, count)
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    bitmap = packed[:border].numpy()
    spare = border * 8 - bitmap_bits
    if _count(bitmap, _ONES) != count or (spare and int(bitmap[-1]) >> (8 - spare)):
        return torch.tensor(False)
    # Blocks ascend, so what is before the last one is inside whatever its low bits say.
    last = max(0, numel - 1) >> low
    tail = _in_last_block(bitmap, bitmap_bits, count, last)
    if tail < 0:
        return torch.tensor(False)
    lows = unpack_bits(packed[border:], low, count)[count - tail :]
    return ((last << low) + lows < numel).all()
