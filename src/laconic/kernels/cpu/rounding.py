"""Stochastic rounding to a few levels, bucket by bucket (the meaning: kernels/reference)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled, inlined
from laconic.kernels.cpu.random import halves, random_word


@inlined
def _scale(x: NDArray[np.float32], l2: bool) -> np.float32:
    found, squares = np.float32(0), 0.0
    for entry in x:
        size = abs(entry)
        if l2:
            squares += np.float64(size) * np.float64(size)
        elif np.isnan(size):
            return size
        elif size > found:
            found = size
    return np.float32(np.sqrt(squares)) if l2 else found


@compiled
def _pack(
    x: NDArray[np.float32],
    width: int,
    bucket: int,
    l2: bool,
    low: np.uint32,
    high: np.uint32,
    out: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> None:
    levels = np.float32((1 << (width - 1)) - 1)
    held, bits, place = np.uint64(0), 0, 0
    codes = np.empty(bucket, dtype=np.uint8)
    for b in range(scales.size):
        start = b * bucket
        stop = min(x.size, start + bucket)
        scale = _scale(x[start:stop], l2)
        scales[b] = scale
        step = levels / scale if scale > 0 else np.float32(0)
        for i in range(start, stop):
            exact = abs(x[i]) * step
            down = np.floor(exact)
            chance = np.float32(random_word(i, low, high) >> np.uint32(8)) * np.float32(2.0**-24)
            level = down + np.float32(chance < exact - down)
            # Written so that NaN becomes level 0; its bucket's scale tells of it.
            level = min(level, levels) if level >= 0 else np.float32(0)
            codes[i - start] = np.uint8(levels - level if x[i] < 0 else levels + level)
        for i in range(stop - start):
            held |= np.uint64(codes[i]) << np.uint64(bits)
            bits += width
            while bits >= 8:
                out[place] = np.uint8(held & np.uint64(255))
                held >>= np.uint64(8)
                bits -= 8
                place += 1
    if bits:
        out[place] = np.uint8(held & np.uint64(255))


@compiled
def _add(
    out: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    width: int,
    bucket: int,
) -> None:
    levels = (1 << (width - 1)) - 1
    mask = np.uint64((1 << width) - 1)
    for row in range(codes.shape[0]):
        held, bits, place = np.uint64(0), 0, 0
        for b in range(scales.shape[1]):
            unit = scales[row, b] / np.float32(levels)
            for i in range(b * bucket, min(out.size, (b + 1) * bucket)):
                while bits < width:
                    held |= np.uint64(codes[row, place]) << np.uint64(bits)
                    bits += 8
                    place += 1
                out[i] += np.float32(np.int64(held & mask) - levels) * unit
                held >>= np.uint64(width)
                bits -= width


def round_pack(x: Tensor, width: int, bucket: int, l2: bool, key: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(-(-x.numel() * width // 8), dtype=torch.uint8)
    scales = torch.empty(-(-x.numel() // bucket), dtype=torch.float32)
    low, high = halves(key)
    _pack(x.numpy(), width, bucket, l2, low, high, out.numpy(), scales.numpy())
    return out, scales


def round_add(out: Tensor, codes: Tensor, scales: Tensor, width: int, bucket: int) -> None:
    _add(out.numpy(), codes.numpy(), scales.numpy(), width, bucket)
