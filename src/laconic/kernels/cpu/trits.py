"""Entries as -1, 0 or 1 by chance, five to a byte (the meaning: kernels/reference/trits.py)."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.arrays import flat_rows
from laconic.kernels.cpu.jit import called, compiled, summing
from laconic.kernels.cpu.random import halves, random_words
from laconic.kernels.cpu.vector import number_of
from laconic.kernels.cpu.votes import largest_bits
from laconic.kernels.door import check_out
from laconic.kernels.reference.trits import PER_BYTE

BLOCK = PER_BYTE * 512

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@summing
def _squares(x: Floats) -> float:
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@compiled
def _measure(x: Floats, clip: bool) -> tuple[np.float32, float]:
    """The largest magnitude and, where asked for, the sum of squares."""
    largest, squares = np.int32(0), 0.0
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        largest = max(largest, largest_bits(block))
        if clip:
            squares += _squares(block)
    return number_of(largest), squares


@called
def _draw(
    x: Floats, chance: NDArray[np.uint32], scale: np.float32, lift: np.float32, digits: Bytes
) -> None:
    unit = scale * lift
    for i in range(x.size):
        dice = np.float32(chance[i] >> np.uint32(8)) * np.float32(2.0**-24)
        said = dice * unit < abs(x[i]) * lift
        sign = np.int32(x[i] > 0) - np.int32(x[i] < 0)
        digits[i] = np.uint8(1 + (sign if said else np.int32(0)))


@called
def _join(digits: Bytes, out: Bytes) -> None:
    for i in range(out.size):
        value = digits[5 * i + 4]
        for column in range(3, -1, -1):
            value = np.uint8(value * 3 + digits[5 * i + column])
        out[i] = value


@compiled
def _pack(x: Floats, scale: np.float32, low: np.uint32, high: np.uint32, out: Bytes) -> None:
    lift = np.float32(2.0**64 if scale < np.float32(2.0**-64) else 1.0)
    digits = np.ones(BLOCK, dtype=np.uint8)
    chance = np.empty(BLOCK, dtype=np.uint32)
    good = np.isfinite(scale)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        if good:
            random_words(start, low, high, chance[: block.size])
            _draw(block, chance, scale, lift, digits)
        # What fills up the last byte is zeros.
        digits[block.size :] = 1
        first = start // PER_BYTE
        _join(digits, out[first : first + (block.size + PER_BYTE - 1) // PER_BYTE])


@called
def _add_run(out: Floats, packed: Bytes, table: Floats) -> None:
    """Bytes to five entries each, looked up."""
    for i in range(packed.size):
        row = np.intp(packed[i]) * 8
        for column in range(PER_BYTE):
            out[i * PER_BYTE + column] += table[row + column]


@compiled
def _add(out: Floats, packed: Bytes, distance: int, scales: Floats, trits: Floats) -> None:
    # A block of the output stays in the cache while all messages are added to it.
    whole, block = out.size // PER_BYTE, BLOCK // PER_BYTE
    table = np.empty((scales.size, trits.size), dtype=np.float32)
    for row in range(scales.size):
        for i in range(trits.size):
            table[row, i] = trits[i] * scales[row]
    for start in range(0, whole, block):
        stop = min(whole, start + block)
        entries = out[start * PER_BYTE : stop * PER_BYTE]
        for row in range(scales.size):
            first = row * distance
            _add_run(entries, packed[first + start : first + stop], table[row])
    for row in range(scales.size):
        for i in range(out.size - whole * PER_BYTE):
            out[whole * PER_BYTE + i] += table[row, np.intp(packed[row * distance + whole]) * 8 + i]


def _meanings() -> Floats:
    """The five trits that each byte says, eight places a byte; above 242 as the reference reads."""
    byte = np.arange(256)[:, None]
    table = np.zeros((256, 8), dtype=np.float32)
    table[:, :PER_BYTE] = byte // 3 ** np.arange(PER_BYTE) % 3 - 1
    return table.reshape(-1)


_TRITS = _meanings()


def trits_pack(x: Tensor, clip: float, key: int) -> tuple[Tensor, Tensor]:
    largest, squares = _measure(x.numpy(), clip > 0)
    scale = float(largest)
    if clip and math.isfinite(scale):
        scale = min(scale, clip * math.sqrt(squares / max(1, x.numel())))
    packed = torch.empty(-(-x.numel() // PER_BYTE), dtype=torch.uint8)
    _pack(x.numpy(), np.float32(scale), *halves(key), packed.numpy())
    return packed, torch.tensor([scale], dtype=torch.float32)


def trits_add(out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None:
    check_out(out)
    flat, distance = flat_rows(packed)
    _add(out.numpy(), flat, distance, (scales * weight).view(-1).numpy(), _TRITS)
