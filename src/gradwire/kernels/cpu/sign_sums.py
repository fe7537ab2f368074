"""Packed signs, and the sums of positive and negative entries, bucket by bucket.

A block of entries stays in the L1 cache while it is added, packed and summed.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.arrays import memory_of
from gradwire.kernels.cpu.jit import called, compiled, summing
from gradwire.kernels.cpu.simd import LANES, negatives, sum_of
from gradwire.kernels.cpu.threads import in_slices
from gradwire.types import EFInput

BLOCK = 2048

Floats = NDArray[np.float32]


@called
def _add_up(x: Floats, decay: np.float32, residual_out: Floats) -> None:
    """`residual_out` becomes x + decay * left."""
    for i in range(x.size):
        residual_out[i] = sum_of(x[i], decay, residual_out[i])


@called
def _add_beside(x: Floats, decay: np.float32, residual: Floats, residual_out: Floats) -> None:
    for i in range(x.size):
        residual_out[i] = sum_of(x[i], decay, residual[i])


@called
def _pack(x: Floats, words: NDArray[np.uint32]) -> None:
    whole = x.size // LANES
    for i in range(whole):
        words[i] = negatives(x, i * LANES)
    if x.size % LANES:
        last = np.uint32(0)
        for i in range(whole * LANES, x.size):
            last |= np.uint32(np.uint32(x[i] < 0) << np.uint32(i % LANES))
        words[whole] = last


@summing
def _sum_up(x: Floats, sums: NDArray[np.float64]) -> None:
    """Adds to `sums` the negative entries, all others, and how many are negative."""
    zero, low, high, count = np.float32(0), np.float32(0), np.float32(0), np.int32(0)
    for i in range(x.size):
        # Both comparisons are false for NaN, so it is in both sums.
        low += zero if x[i] >= zero else x[i]
        high += zero if x[i] < zero else x[i]
        count += np.int32(x[i] < zero)
    if np.isfinite(low) and np.isfinite(high):
        sums[0] += low
        sums[1] += high
    else:
        _sum_up_wide(x, sums)
    sums[2] += count


@summing
def _sum_sizes(x: Floats, sums: NDArray[np.float64]) -> None:
    """The same without a difference between the sides: all magnitudes count as the others."""
    total = np.float32(0)
    for i in range(x.size):
        total += abs(x[i])
    if np.isfinite(total):
        sums[1] += total
    else:
        _sum_up_wide(x, sums)


@called
def _sum_up_wide(x: Floats, sums: NDArray[np.float64]) -> None:
    """The same sums where those of float32 leave its range."""
    for i in range(x.size):
        sums[0] += np.float32(0) if x[i] >= np.float32(0) else x[i]
        sums[1] += np.float32(0) if x[i] < np.float32(0) else x[i]


@compiled
def _measure(
    x: Floats,
    decay: np.float32,
    residual: Floats,
    residual_out: Floats,
    apart: bool,
    words: NDArray[np.uint32],
    pieces: NDArray[np.float64],
    bucket: int,
    even: bool,
    begin: int,
    end: int,
) -> None:
    """Packs x, or x + decay * residual where there is a `residual_out`, and sums it up piece by piece.

    The residual is in `residual_out`, unless that is `apart`. A piece ends with a block or a bucket.
    """
    feedback = residual_out.size > 0
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        block = residual_out[start:stop] if feedback else x[start:stop]
        if apart:
            _add_beside(x[start:stop], decay, residual[start:stop], block)
        elif feedback:
            _add_up(x[start:stop], decay, block)
        _pack(block, words[start // LANES : start // LANES + BLOCK // LANES])
        for b in range(start // bucket, (stop - 1) // bucket + 1):
            first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
            # With every piece the one or the other number rises, so each has a place of its own.
            piece = pieces[start // BLOCK + b]
            if even:
                _sum_sizes(block[first - start : last - start], piece)
            else:
                _sum_up(block[first - start : last - start], piece)


@compiled
def _join(pieces: NDArray[np.float64], numel: int, bucket: int, sums: NDArray[np.float64]) -> None:
    """The sums of buckets, piece after piece."""
    for b in range(sums.shape[0]):
        last = min(numel, (b + 1) * bucket) - 1
        for block in range(b * bucket // BLOCK, last // BLOCK + 1):
            for side in range(sums.shape[1]):
                sums[b, side] += pieces[block + b, side]


@called
def _take_back(residual_out: Floats, low: np.float32, high: np.float32) -> None:
    for i in range(residual_out.size):
        residual_out[i] -= low if residual_out[i] < 0 else high


@compiled
def _settle(
    residual_out: Floats, low: Floats, high: Floats, bucket: int, start: int, stop: int
) -> None:
    for b in range(start // bucket, (stop - 1) // bucket + 1):
        first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
        _take_back(residual_out[first:last], low[b], high[b])


def settle(residual_out: Tensor, low: Tensor, high: Tensor, bucket: int) -> None:
    """Takes away from each bucket what is said of its two sides."""
    in_slices(
        partial(_settle, residual_out.numpy(), low.numpy(), high.numpy(), bucket),
        residual_out.numel(),
    )


def measure(given: EFInput, bucket: int, even: bool = False) -> tuple[Tensor, NDArray[np.float64]]:
    """The packed signs; and for each bucket the sums of its two sides, and how many are negative.

    `given.residual_out` becomes the sum, if it is there. `even` is for the difference of the sums alone,
    which it gives faster.
    """
    x = given.grad
    words = torch.empty(-(-x.numel() // LANES), dtype=torch.int32)
    sums = np.zeros((-(-x.numel() // bucket), 3))
    pieces = np.zeros((-(-x.numel() // BLOCK) + len(sums), 3))
    bits = words.view(torch.uint8)[: -(-x.numel() // 8)]
    packed = words.numpy().view(np.uint32)
    kept, rest = memory_of(given)
    apart, decay = kept is not rest, np.float32(given.decay)
    loop = partial(_measure, x.numpy(), decay, kept, rest, apart, packed, pieces, bucket, even)
    in_slices(loop, x.numel(), BLOCK)
    _join(pieces, x.numel(), bucket, sums)
    return bits, sums
