"""Stochastic rounding to a few levels, bucket by bucket (the meaning: kernels/reference).

A bucket fits the cache, so it is walked through several times, each time by a loop that is simple
enough to become vector instructions.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled, inlined
from laconic.kernels.cpu.random import halves, random_words


@inlined
def _scale(
    x: NDArray[np.float32],
    bits: NDArray[np.int32],
    l2: bool,
    word: NDArray[np.int32],
    number: NDArray[np.float32],
) -> np.float32:
    """`word` and `number` are one piece of memory, to read the bits of one as the other."""
    if l2:
        squares = 0.0
        for entry in x:
            squares += np.float64(entry) * np.float64(entry)
        return np.float32(np.sqrt(squares))
    # The bits of magnitudes sort as they do, and NaN above them all.
    largest = np.int32(0)
    for each in bits:
        largest = max(largest, each & np.int32(0x7FFFFFFF))
    word[0] = largest
    return number[0]


@inlined
def _round(
    x: NDArray[np.float32],
    step: np.float32,
    levels: np.float32,
    chance: NDArray[np.uint32],
    codes: NDArray[np.uint8],
) -> None:
    for i in range(x.size):
        exact = abs(x[i]) * step
        down = np.floor(exact)
        dice = np.float32(chance[i] >> np.uint32(8)) * np.float32(2.0**-24)
        level = min(down + np.float32(dice < exact - down), levels)
        # NaN becomes level 0; its bucket's scale tells of it.
        level = level if level >= np.float32(0) else np.float32(0)
        codes[i] = np.uint8(np.int32(levels - level if x[i] < 0 else levels + level))


@compiled
def _pack(
    x: NDArray[np.float32],
    words: NDArray[np.int32],
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
    codes = np.empty(bucket + 1, dtype=np.uint8)
    chance = np.empty(bucket, dtype=np.uint32)
    word = np.empty(1, dtype=np.int32)
    number = word.view(np.float32)
    for b in range(scales.size):
        start = b * bucket
        entries = x[start : start + bucket]
        scale = _scale(entries, words[start : start + bucket], l2, word, number)
        scales[b] = scale
        step = levels / scale if scale > 0 else np.float32(0)
        random_words(start, low, high, chance[: entries.size])
        _round(entries, step, levels, chance, codes)
        if width == 4 and bits == 0:
            # Half bytes need no bit buffer; an odd last one is followed by zeros.
            codes[entries.size] = 0
            for i in range((entries.size + 1) // 2):
                out[place + i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))
            place += entries.size // 2
            if entries.size % 2:
                held, bits = np.uint64(codes[entries.size - 1]), 4
            continue
        for i in range(entries.size):
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
    levels = np.float32((1 << (width - 1)) - 1)
    mask = np.uint32((1 << width) - 1)
    values = np.empty(bucket + 1, dtype=np.uint8)
    for b in range(scales.shape[1]):
        start = b * bucket
        entries = out[start : start + bucket]
        first = start * width
        for row in range(codes.shape[0]):
            unit = scales[row, b] / levels
            if width == 4 and first % 8 == 0:
                for i in range((entries.size + 1) // 2):
                    pair = codes[row, first // 8 + i]
                    values[2 * i] = pair & np.uint8(15)
                    values[2 * i + 1] = pair >> np.uint8(4)
            else:
                _unpack(codes[row], first, width, mask, values[: entries.size])
            for i in range(entries.size):
                entries[i] += (np.float32(values[i]) - levels) * unit


@inlined
def _unpack(
    packed: NDArray[np.uint8], first: int, width: int, mask: np.uint32, out: NDArray[np.uint8]
) -> None:
    for i in range(out.size):
        place = first + i * width
        byte, shift = place >> 3, np.uint32(place & 7)
        pair = np.uint32(packed[byte])
        if (place & 7) + width > 8:
            pair |= np.uint32(packed[byte + 1]) << np.uint32(8)
        out[i] = np.uint8((pair >> shift) & mask)


def round_pack(x: Tensor, width: int, bucket: int, l2: bool, key: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(-(-x.numel() * width // 8), dtype=torch.uint8)
    scales = torch.empty(-(-x.numel() // bucket), dtype=torch.float32)
    low, high = halves(key)
    words = x.view(torch.int32).numpy()
    _pack(x.numpy(), words, width, bucket, l2, low, high, out.numpy(), scales.numpy())
    return out, scales


def round_pack_sum(
    x: Tensor,
    residual: Tensor,
    decay: float,
    left: Tensor,
    width: int,
    bucket: int,
    l2: bool,
    key: int,
) -> tuple[Tensor, Tensor]:
    total = torch.add(x, residual, alpha=decay, out=left)
    codes, scales = round_pack(total, width, bucket, l2, key)
    round_add(left, codes.unsqueeze(0), -scales.unsqueeze(0), width, bucket)
    return codes, scales


def round_add(out: Tensor, codes: Tensor, scales: Tensor, width: int, bucket: int) -> None:
    _add(out.numpy(), codes.numpy(), scales.numpy(), width, bucket)
