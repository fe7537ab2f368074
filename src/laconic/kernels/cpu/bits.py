"""Small unsigned numbers, packed (the format: kernels/reference/bits.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled


@compiled
def _pack(values: NDArray[np.int64], width: int, out: NDArray[np.uint8]) -> None:
    held, bits, place = np.uint64(0), 0, 0
    for i in range(values.size):
        held |= np.uint64(values[i]) << np.uint64(bits)
        bits += width
        while bits >= 8:
            out[place] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            bits -= 8
            place += 1
    if bits:
        out[place] = np.uint8(held & np.uint64(255))


@compiled
def _unpack(packed: NDArray[np.uint8], width: int, out: NDArray[np.int64]) -> None:
    mask = np.uint64((1 << width) - 1)
    held, bits, place = np.uint64(0), 0, 0
    for i in range(out.size):
        while bits < width:
            held |= np.uint64(packed[place]) << np.uint64(bits)
            bits += 8
            place += 1
        out[i] = np.int64(held & mask)
        held >>= np.uint64(width)
        bits -= width


def pack_bits(values: Tensor, width: int) -> Tensor:
    out = torch.empty(-(-values.numel() * width // 8), dtype=torch.uint8)
    if out.numel():
        _pack(values.to(torch.int64).numpy(), width, out.numpy())
    return out


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 0:
        return torch.zeros(count, dtype=torch.int64)
    out = torch.empty(count, dtype=torch.int64)
    assert packed.numel() * 8 >= count * width
    _unpack(packed.numpy(), width, out.numpy())
    return out
