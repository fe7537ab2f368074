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
def _ones(bitmap: NDArray[np.uint8], low: int, out: NDArray[np.int64]) -> int:
    """Writes the block starts of the set bits, and returns how many there are (maybe too many)."""
    found = 0
    for byte in range(bitmap.size):
        value = bitmap[byte]
        for bit in range(8):
            if value >> bit & 1:
                if found < out.size:
                    out[found] = (byte * 8 + bit - found) << low
                found += 1
    return found


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    out = torch.zeros(border + -(-index.numel() * low // 8), dtype=torch.uint8)
    _mark(index.numpy(), low, out[:border].numpy())
    out[border:] = pack_bits(index & ((1 << low) - 1), low)
    return out


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    out = torch.zeros(count, dtype=torch.int64)
    _ones(packed[:border].numpy(), low, out.numpy())
    if low:
        out |= unpack_bits(packed[border:], low, count)
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    border = -(-bitmap_bits // 8)
    high = torch.zeros(count, dtype=torch.int64)
    found = _ones(packed[:border].numpy(), low, high.numpy())
    spare = border * 8 - bitmap_bits
    if found != count or (spare and int(packed[border - 1]) >> (8 - spare)):
        return torch.tensor(False)
    # Blocks ascend, so only those of the last one can reach beyond the end.
    high |= unpack_bits(packed[border:], low, count)
    return (high < numel).all()
