"""Signs in one bit each, with means or as votes (definition: kernels/reference/sign.py)."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.arrays import flat_rows
from gradwire.kernels.cpu.jit import compiled, inlined
from gradwire.kernels.cpu.random import key_words, random_word
from gradwire.kernels.cpu.sign_sums import BLOCK, Floats, pack_and_sum, subtract_means
from gradwire.kernels.cpu.simd import LANES, add_either, bits_of, negatives, word_at, zeros
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.validation import check_out
from gradwire.types import EFInput

Bytes = NDArray[np.uint8]


@inlined
def _add_one(
    out: Floats, i: int, bits: Bytes, first: int, low: np.float32, high: np.float32
) -> None:
    out[i] += low if (bits[first + i // 8] >> np.uint8(i % 8)) & 1 else high


@compiled
def _add_run(
    out: Floats, start: int, stop: int, bits: Bytes, first: int, low: np.float32, high: np.float32
) -> None:
    """Adds to entries `start` to `stop` by their signs in the message that begins at `first`."""
    i = start
    while i < stop and i % LANES:
        _add_one(out, i, bits, first, low, high)
        i += 1
    while i + LANES <= stop:
        add_either(out, i, word_at(bits, first + i // 8), low, high)
        i += LANES
    while i < stop:
        _add_one(out, i, bits, first, low, high)
        i += 1


@compiled
def _add(
    out: Floats,
    bits: Bytes,
    distance: int,
    low: NDArray[np.float32],
    high: Floats,
    bucket: int,
    begin: int,
    end: int,
) -> None:
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        for row in range(low.shape[0]):
            for b in range(start // bucket, (stop - 1) // bucket + 1):
                first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
                _add_run(out, first, last, bits, row * distance, low[row, b], high[row, b])


def _means(sums: NDArray[np.float64], numel: int, bucket: int) -> tuple[Tensor, Tensor]:
    below = sums[:, 2]
    above = np.minimum(bucket, numel - bucket * np.arange(below.size)) - below
    low, high = torch.empty(below.size), torch.empty(below.size)
    low.numpy()[:] = sums[:, 0] / np.maximum(1, below)
    high.numpy()[:] = sums[:, 1] / np.maximum(1, above)
    return low, high


def sign_means_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = pack_and_sum(EFInput(x), bucket)
    return bits, *_means(sums, x.numel(), bucket)


def sign_means_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = pack_and_sum(EFInput(x, residual, residual_out, decay), bucket)
    low, high = _means(sums, x.numel(), bucket)
    subtract_means(residual_out, low, high, bucket)
    return bits, low, high


def sign_means_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    check_out(out)
    packed, distance = flat_rows(bits)
    means = (low * weight).numpy(), (high * weight).numpy()
    in_slices(partial(_add, out.numpy(), packed, distance, *means, bucket), out.numel(), BLOCK)


def _scale(sums: NDArray[np.float64], numel: int) -> Tensor:
    total = (sums[:, 1] - sums[:, 0]).sum() / max(1, numel)
    return torch.tensor([total], dtype=torch.float32)


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = pack_and_sum(EFInput(x), max(1, x.numel()), magnitudes=True)
    return bits, _scale(sums, x.numel())


def sign_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor
) -> tuple[Tensor, Tensor]:
    bucket = max(1, x.numel())
    bits, sums = pack_and_sum(EFInput(x, residual, residual_out, decay), bucket, magnitudes=True)
    scale = _scale(sums, x.numel())
    subtract_means(residual_out, -scale, scale, bucket)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    sign_means_add(out, bits, -scales, scales, weight, max(1, out.numel()))


CHUNK = 4096


@compiled
def largest_bits(x: NDArray[np.float32]) -> np.int32:
    """Returns the bits of the largest magnitude; those of NaN are above all others."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, bits_of(x[i]) & np.int32(0x7FFFFFFF))
    return largest


@compiled
def _pack(
    x: NDArray[np.float32], first: int, low: np.uint32, high: np.uint32, words: NDArray[np.uint32]
) -> np.int32:
    """Packs a slice that begins at word `first`; returns the bits of its largest magnitude."""
    largest = np.int32(0)
    whole = x.size // LANES
    for start in range(0, whole * LANES, CHUNK):
        block = x[start : min(start + CHUNK, whole * LANES)]
        largest = max(largest, largest_bits(block))
        for i in range(block.size // LANES):
            word, zero = negatives(block, i * LANES), zeros(block, i * LANES)
            if zero:
                word |= zero & random_word(first + start // LANES + i, low, high)
            words[start // LANES + i] = word
    if x.size % LANES:
        noise, last = random_word(first + whole, low, high), np.uint32(0)
        for i in range(x.size - whole * LANES):
            entry = x[whole * LANES + i]
            bit = np.uint32(entry < 0) | (np.uint32(entry == 0) & (noise >> np.uint32(i)))
            last |= np.uint32((bit & np.uint32(1)) << np.uint32(i))
        words[whole] = last
        largest = max(largest, largest_bits(x[whole * LANES :]))
    return largest


def sign_votes_pack(x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    words = torch.empty(-(-x.numel() // LANES), dtype=torch.int32)
    entries, noise, out = x.numpy(), key_words(key), words.numpy().view(np.uint32)

    def loop(start: int, stop: int) -> np.int32:
        first = start // LANES
        return _pack(entries[start:stop], first, *noise, out[first:])

    largest = max(in_slices(loop, x.numel(), CHUNK))
    weight = float("nan") if largest >= 0x7F800000 else float(largest > 0)
    return words.view(torch.uint8)[: -(-x.numel() // 8)], torch.tensor([weight])
