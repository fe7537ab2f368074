"""Packed signs, and the sums of positive and negative entries, bucket by bucket.

A block of entries stays in the L1 cache while it is added, packed and summed.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.arrays import residual_arrays
from gradwire.kernels.cpu.jit import compiled, compiled_sums
from gradwire.kernels.cpu.simd import LANES, negatives, sum_of
from gradwire.kernels.cpu.threads import in_slices
from gradwire.types import EFInput

BLOCK = 2048

Floats = NDArray[np.float32]


@compiled
def _add_up(x: Floats, decay: np.float32, residual_out: Floats) -> None:
    """Sets `residual_out` to x + decay * residual_out."""
    for i in range(x.size):
        residual_out[i] = sum_of(x[i], decay, residual_out[i])


@compiled
def _add_beside(x: Floats, decay: np.float32, residual: Floats, residual_out: Floats) -> None:
    """Sets `residual_out` to x + decay * residual."""
    for i in range(x.size):
        residual_out[i] = sum_of(x[i], decay, residual[i])


@compiled
def _pack(x: Floats, words: NDArray[np.uint32]) -> None:
    whole = x.size // LANES
    for i in range(whole):
        words[i] = negatives(x, i * LANES)
    if x.size % LANES:
        last = np.uint32(0)
        for i in range(whole * LANES, x.size):
            last |= np.uint32(np.uint32(x[i] < 0) << np.uint32(i % LANES))
        words[whole] = last


@compiled_sums
def _sum_up(x: Floats, sums: NDArray[np.float64]) -> None:
    """Adds to `sums` the sum of negative entries, that of all others, and the negative count."""
    zero, low, high, count = np.float32(0), np.float32(0), np.float32(0), np.int32(0)
    for i in range(x.size):
        # Both comparisons are false for NaN, so both sums become NaN.
        low += zero if x[i] >= zero else x[i]
        high += zero if x[i] < zero else x[i]
        count += np.int32(x[i] < zero)
    if np.isfinite(low) and np.isfinite(high):
        sums[0] += low
        sums[1] += high
    else:
        _sum_up_wide(x, sums)
    sums[2] += count


@compiled_sums
def _sum_sizes(x: Floats, sums: NDArray[np.float64]) -> None:
    """Adds the sum of magnitudes to `sums[1]`, for callers that need sums[1] - sums[0] only."""
    total = np.float32(0)
    for i in range(x.size):
        total += abs(x[i])
    if np.isfinite(total):
        sums[1] += total
    else:
        _sum_up_wide(x, sums)


@compiled
def _sum_up_wide(x: Floats, sums: NDArray[np.float64]) -> None:
    """Adds the sums of `_sum_up` in float64, if those of float32 leave its range."""
    for i in range(x.size):
        sums[0] += np.float32(0) if x[i] >= np.float32(0) else x[i]
        sums[1] += np.float32(0) if x[i] < np.float32(0) else x[i]


@compiled
def _pack_and_sum(
    x: Floats,
    decay: np.float32,
    residual: Floats,
    residual_out: Floats,
    separate: bool,
    words: NDArray[np.uint32],
    pieces: NDArray[np.float64],
    bucket: int,
    magnitudes: bool,
    begin: int,
    end: int,
) -> None:
    """Packs x, or x + decay * residual if `residual_out` is not empty, and sums it up in pieces.

    The residual is in `residual_out`, unless it is `separate`. A piece ends with a block or bucket.
    """
    feedback = residual_out.size > 0
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        block = residual_out[start:stop] if feedback else x[start:stop]
        if separate:
            _add_beside(x[start:stop], decay, residual[start:stop], block)
        elif feedback:
            _add_up(x[start:stop], decay, block)
        _pack(block, words[start // LANES : start // LANES + BLOCK // LANES])
        for b in range(start // bucket, (stop - 1) // bucket + 1):
            first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
            # Every piece has its own index, since one of the two numbers grows with each piece.
            piece = pieces[start // BLOCK + b]
            if magnitudes:
                _sum_sizes(block[first - start : last - start], piece)
            else:
                _sum_up(block[first - start : last - start], piece)


@compiled
def _join(pieces: NDArray[np.float64], numel: int, bucket: int, sums: NDArray[np.float64]) -> None:
    """Adds up the pieces of each bucket, in order."""
    for b in range(sums.shape[0]):
        last = min(numel, (b + 1) * bucket) - 1
        for block in range(b * bucket // BLOCK, last // BLOCK + 1):
            for column in range(sums.shape[1]):
                sums[b, column] += pieces[block + b, column]


@compiled
def _subtract(residual_out: Floats, low: np.float32, high: np.float32) -> None:
    for i in range(residual_out.size):
        residual_out[i] -= low if residual_out[i] < 0 else high


@compiled
def _subtract_means(
    residual_out: Floats, low: Floats, high: Floats, bucket: int, start: int, stop: int
) -> None:
    for b in range(start // bucket, (stop - 1) // bucket + 1):
        first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
        _subtract(residual_out[first:last], low[b], high[b])


def subtract_means(residual_out: Tensor, low: Tensor, high: Tensor, bucket: int) -> None:
    """Subtracts the mean of its sign from every entry, bucket by bucket."""
    in_slices(
        partial(_subtract_means, residual_out.numpy(), low.numpy(), high.numpy(), bucket),
        residual_out.numel(),
    )


def pack_and_sum(
    ef: EFInput, bucket: int, magnitudes: bool = False
) -> tuple[Tensor, NDArray[np.float64]]:
    """Returns the packed signs, and per bucket the sums of `_sum_up`.

    `ef.residual_out` becomes the gradient plus the residual, if it is given. With `magnitudes` only
    the difference of the two sums is right, which is faster.
    """
    x = ef.grad
    words = torch.empty(-(-x.numel() // LANES), dtype=torch.int32)
    sums = np.zeros((-(-x.numel() // bucket), 3))
    pieces = np.zeros((-(-x.numel() // BLOCK) + len(sums), 3))
    bits = words.view(torch.uint8)[: -(-x.numel() // 8)]
    packed = words.numpy().view(np.uint32)
    residual, residual_out = residual_arrays(ef)
    separate, decay = residual is not residual_out, np.float32(ef.decay)
    loop = partial(
        _pack_and_sum,
        x.numpy(), decay, residual, residual_out, separate, packed, pieces, bucket, magnitudes,
    )  # fmt: skip
    in_slices(loop, x.numel(), BLOCK)
    _join(pieces, x.numel(), bucket, sums)
    return bits, sums
