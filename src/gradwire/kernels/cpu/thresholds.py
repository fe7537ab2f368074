"""Thresholds for about k entries (definition: kernels/reference/thresholds.py).

One pass over memory for every statistic and every candidate threshold.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled, compiled_sums
from gradwire.kernels.cpu.random import strata
from gradwire.kernels.cpu.select import select_largest
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference.thresholds import HALVINGS, LOWERINGS
from gradwire.types import EFInput

INFINITE = np.int32(0x7F800000)
"""Bits of infinity; those of NaN are larger."""

BLOCK = 1 << 14
"""Entries of one partial sum."""

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@compiled_sums
def _sums(x: Floats, out: Doubles) -> None:
    """Writes the sums of |x|, x and x^2 over the finite entries of each block."""
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        size, total, square = 0.0, 0.0, 0.0
        for i in range(block.size):
            # Written so that NaN counts as zero.
            value = np.float64(block[i] if abs(block[i]) < np.float32(np.inf) else np.float32(0))
            size += abs(value)
            total += value
            square += value * value
        out[start // BLOCK, 0], out[start // BLOCK, 1], out[start // BLOCK, 2] = size, total, square


@compiled
def _largest(bits: NDArray[np.int32]) -> int:
    """Returns the bits of the largest finite magnitude."""
    top = np.int32(0)
    for i in range(bits.size):
        size = bits[i] & np.int32(0x7FFFFFFF)
        top = max(top, size if size < INFINITE else np.int32(0))
    return top


@compiled
def _count(x: Floats, threshold: float) -> int:
    """Counts the finite magnitudes that reach the threshold, rounded to float32."""
    least = np.float32(threshold)
    if least == 0:
        return x.size
    found = 0
    for i in range(x.size):
        found += (abs(x[i]) >= least) & (abs(x[i]) < np.float32(np.inf))
    return found


@compiled_sums
def _sum_above(least: float, x: Floats, out: Doubles) -> None:
    """Writes the sum and count of magnitudes >= `least` of each block; non-finite ones are zero."""
    for start in range(0, x.size, BLOCK):
        block, total, reach = x[start : start + BLOCK], 0.0, 0
        for i in range(block.size):
            size = abs(block[i]) if abs(block[i]) < np.float32(np.inf) else np.float32(0)
            here = size >= least
            total += np.float64(size if here else np.float32(0))
            reach += here
        out[start // BLOCK, 0], out[start // BLOCK, 1] = total, reach


def _summed(loop: Callable[[Floats, Doubles], None], x: Tensor, count: int) -> list[float]:
    """Returns `count` sums over all blocks; added exactly, so their order does not matter."""
    entries = x.numpy()
    sums = np.empty((-(-x.numel() // BLOCK), count))
    in_slices(
        lambda start, stop: loop(entries[start:stop], sums[start // BLOCK :]), x.numel(), BLOCK
    )
    return [math.fsum(column) for column in sums.T]


def _count_above(x: Tensor, threshold: float) -> int:
    entries = x.numpy()
    return sum(in_slices(lambda start, stop: _count(entries[start:stop], threshold), x.numel()))


def _largest_magnitude(x: Tensor) -> float:
    """Returns the largest finite magnitude."""
    bits = x.view(torch.int32).numpy()
    largest = max(in_slices(lambda start, stop: _largest(bits[start:stop]), x.numel()))
    return float(np.int32(largest).view(np.float32))


def _as_tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


def sampled_threshold(
    ef: EFInput, key: int, sample_size: int, sample_rank: int, min_count: int
) -> Tensor:
    x = ef.total()
    if not x.numel():
        return _as_tensor(0.0)
    sample = x[strata(key, x.numel(), sample_size, x.device)].abs().nan_to_num_(0.0, 0.0)
    threshold = float(sample[select_largest(EFInput(sample), sample_rank)].min())
    for _ in range(LOWERINGS):
        if _count_above(x, threshold) >= min_count:
            break
        threshold = 0.8 * threshold
    return _as_tensor(threshold)


def bisected_threshold(ef: EFInput, count: int) -> Tensor:
    x = ef.total()
    if not x.numel():
        return _as_tensor(0.0)
    high = _largest_magnitude(x)
    low = min(_summed(_sums, x, 3)[0] / x.numel(), high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reach = _count_above(x, middle)
        if count <= reach <= 2 * count:
            return _as_tensor(middle)
        low, high = (low, middle) if reach < count else (middle, high)
    return _as_tensor(low)


def excess_threshold(ef: EFInput, stage_ratios: Sequence[float]) -> Tensor:
    x = ef.total()
    if not x.numel():
        return _as_tensor(0.0)
    threshold, top = 0.0, _largest_magnitude(x)
    for ratio in stage_ratios:
        least = np.float32(threshold)
        total, reach = _summed(partial(_sum_above, least), x, 2)
        over = max(total / reach - float(least), 0.0)
        threshold = min(threshold - over * math.log(ratio), top)
    return _as_tensor(threshold)


def normal_threshold(ef: EFInput, deviations: float, count: int, rounds: int) -> Tensor:
    x = ef.total()
    if not x.numel():
        return _as_tensor(0.0)
    _, total, square = _summed(_sums, x, 3)
    mean = total / x.numel()
    threshold = abs(mean) + deviations * math.sqrt(max(0.0, square / x.numel() - mean * mean))
    low, high = 0.0, math.inf
    for _ in range(rounds):
        reach = _count_above(x, threshold)
        if 2 * count <= 3 * reach <= 4 * count:
            break
        low, high = (low, threshold) if 3 * reach < 2 * count else (threshold, high)
        threshold = (low + high) / 2 if high < math.inf else threshold * 1.5
    else:
        threshold = low if low > 0 and high < math.inf else threshold
    return _as_tensor(min(threshold, _largest_magnitude(x)))
