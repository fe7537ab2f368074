"""Stochastic ternary quantization (definition: kernels/reference/ternary.py)."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.arrays import flat_rows
from gradwire.kernels.cpu.jit import compiled, compiled_sums
from gradwire.kernels.cpu.random import key_words, random_words
from gradwire.kernels.cpu.sign import largest_bits
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference.ternary import PER_BYTE
from gradwire.kernels.validation import check_out

BLOCK = PER_BYTE * 512

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@compiled_sums
def _squares(x: Floats) -> float:
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@compiled
def _measure(x: Floats, squares: NDArray[np.float64]) -> np.int32:
    """Returns the bits of the largest magnitude; writes sums of squares if there is an array."""
    largest = np.int32(0)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        largest = max(largest, largest_bits(block))
        if squares.size:
            squares[start // BLOCK] = _squares(block)
    return largest


@compiled
def _draw(
    x: Floats, words: NDArray[np.uint32], scale: np.float32, rescale: np.float32, digits: Bytes
) -> None:
    unit = scale * rescale
    for i in range(x.size):
        noise = np.float32(words[i] >> np.uint32(8)) * np.float32(2.0**-24)
        nonzero = noise * unit < abs(x[i]) * rescale
        sign = np.int32(x[i] > 0) - np.int32(x[i] < 0)
        digits[i] = np.uint8(1 + (sign if nonzero else np.int32(0)))


@compiled
def _join(digits: Bytes, out: Bytes) -> None:
    for i in range(out.size):
        value = digits[5 * i + 4]
        for column in range(3, -1, -1):
            value = np.uint8(value * 3 + digits[5 * i + column])
        out[i] = value


@compiled
def _pack(
    x: Floats, first: int, scale: np.float32, low: np.uint32, high: np.uint32, out: Bytes
) -> None:
    """Packs a slice of a tensor that begins at its entry `first`."""
    rescale = np.float32(2.0**64 if scale < np.float32(2.0**-64) else 1.0)
    digits = np.ones(BLOCK, dtype=np.uint8)
    words = np.empty(BLOCK, dtype=np.uint32)
    finite = np.isfinite(scale)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        if finite:
            random_words(first + start, low, high, words[: block.size])
            _draw(block, words, scale, rescale, digits)
        # The last byte is padded with zeros.
        digits[block.size :] = 1
        place = start // PER_BYTE
        _join(digits, out[place : place + (block.size + PER_BYTE - 1) // PER_BYTE])


@compiled
def _add_run(out: Floats, packed: Bytes, table: Floats) -> None:
    """Adds five entries per byte, from a lookup table."""
    for i in range(packed.size):
        row = np.intp(packed[i]) * 8
        for column in range(PER_BYTE):
            out[i * PER_BYTE + column] += table[row + column]


@compiled
def _add(out: Floats, packed: Bytes, distance: int, table: NDArray[np.float32]) -> None:
    # A block of the output stays in the cache while all messages are added to it.
    whole, block = out.size // PER_BYTE, BLOCK // PER_BYTE
    for start in range(0, whole, block):
        stop = min(whole, start + block)
        entries = out[start * PER_BYTE : stop * PER_BYTE]
        for row in range(table.shape[0]):
            first = row * distance
            _add_run(entries, packed[first + start : first + stop], table[row])
    for row in range(table.shape[0]):
        for i in range(out.size - whole * PER_BYTE):
            out[whole * PER_BYTE + i] += table[row, np.intp(packed[row * distance + whole]) * 8 + i]


def _decode_table() -> Floats:
    """Returns the five trits of each byte, at a stride of eight; above 242 as in the reference."""
    byte = np.arange(256)[:, None]
    table = np.zeros((256, 8), dtype=np.float32)
    table[:, :PER_BYTE] = byte // 3 ** np.arange(PER_BYTE) % 3 - 1
    return table.reshape(-1)


_TRITS = _decode_table()


def trits_pack(x: Tensor, clip: float, key: int) -> tuple[Tensor, Tensor]:
    scale = _scale(x, clip)
    packed = torch.empty(-(-x.numel() // PER_BYTE), dtype=torch.uint8)
    entries, words, out = x.numpy(), key_words(key), packed.numpy()

    def loop(start: int, stop: int) -> None:
        _pack(entries[start:stop], start, np.float32(scale), *words, out[start // PER_BYTE :])

    in_slices(loop, x.numel(), BLOCK, effort=4)
    return packed, torch.tensor([scale], dtype=torch.float32)


def _scale(x: Tensor, clip: float) -> float:
    """Returns the largest magnitude or, if less, `clip` times the root mean square."""
    entries = x.numpy()
    squares = np.empty(-(-x.numel() // BLOCK) if clip else 0)

    def loop(start: int, stop: int) -> np.int32:
        return _measure(entries[start:stop], squares[start // BLOCK :])

    scale = float(np.int32(max(in_slices(loop, x.numel(), BLOCK))).view(np.float32))
    if clip and math.isfinite(scale):
        scale = min(scale, clip * math.sqrt(math.fsum(squares) / max(1, x.numel())))
    return scale


def trits_add(out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None:
    check_out(out)
    flat, distance = flat_rows(packed)
    table = torch.outer((scales * weight).view(-1), torch.from_numpy(_TRITS)).numpy()
    entries = out.numpy()

    def loop(start: int, stop: int) -> None:
        _add(entries[start:stop], flat[start // PER_BYTE :], distance, table)

    in_slices(loop, out.numel(), BLOCK, effort=2 * len(table))
