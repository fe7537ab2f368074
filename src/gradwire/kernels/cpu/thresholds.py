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
from gradwire.kernels.cpu.select import largest
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference.thresholds import HALVINGS, LOWERINGS
from gradwire.types import EFInput

INFINITE = np.int32(0x7F800000)
"""The bits of infinity; those of NaN are above."""


BLOCK = 1 << 14
"""Entries of one partial sum."""

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@compiled_sums
def _sums(x: Floats, out: Doubles) -> None:
    """The sums of |x|, x and x^2 over finite entries, block by block."""
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        size, total, square = 0.0, 0.0, 0.0
        for i in range(block.size):
            # Written so that NaN is out.
            value = np.float64(block[i] if abs(block[i]) < np.float32(np.inf) else np.float32(0))
            size += abs(value)
            total += value
            square += value * value
        out[start // BLOCK, 0], out[start // BLOCK, 1], out[start // BLOCK, 2] = size, total, square


@compiled
def _largest(bits: NDArray[np.int32]) -> int:
    """The bits of the largest finite magnitude."""
    top = np.int32(0)
    for i in range(bits.size):
        size = bits[i] & np.int32(0x7FFFFFFF)
        top = max(top, size if size < INFINITE else np.int32(0))
    return top


@compiled
def _reach(x: Floats, border: float) -> int:
    """How many finite magnitudes reach the border, rounded to float32."""
    least = np.float32(border)
    if least == 0:
        return x.size
    found = 0
    for i in range(x.size):
        found += (abs(x[i]) >= least) & (abs(x[i]) < np.float32(np.inf))
    return found


@compiled_sums
def _above(least: float, x: Floats, out: Doubles) -> None:
    """The sums of magnitudes that reach a float32, and how many do; what is not finite is zero."""
    for start in range(0, x.size, BLOCK):
        block, total, reach = x[start : start + BLOCK], 0.0, 0
        for i in range(block.size):
            size = abs(block[i]) if abs(block[i]) < np.float32(np.inf) else np.float32(0)
            here = size >= least
            total += np.float64(size if here else np.float32(0))
            reach += here
        out[start // BLOCK, 0], out[start // BLOCK, 1] = total, reach


def _summed(loop: Callable[[Floats, Doubles], None], x: Tensor, count: int) -> list[float]:
    """So many sums over all blocks, exact from there on: their order does not matter."""
    entries = x.numpy()
    sums = np.empty((-(-x.numel() // BLOCK), count))
    in_slices(
        lambda start, stop: loop(entries[start:stop], sums[start // BLOCK :]), x.numel(), BLOCK
    )
    return [math.fsum(column) for column in sums.T]


def _reaching(x: Tensor, border: float) -> int:
    entries = x.numpy()
    return sum(in_slices(lambda start, stop: _reach(entries[start:stop], border), x.numel()))


def _top(x: Tensor) -> float:
    """The largest finite magnitude."""
    bits = x.view(torch.int32).numpy()
    largest = max(in_slices(lambda start, stop: _largest(bits[start:stop]), x.numel()))
    return float(np.int32(largest).view(np.float32))


def _border(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


def sampled_border(given: EFInput, key: int, tried: int, top: int, enough: int) -> Tensor:
    x = given.total()
    if not x.numel():
        return _border(0.0)
    sample = x[strata(key, x.numel(), tried, x.device)].abs().nan_to_num_(0.0, 0.0)
    border = float(sample[largest(EFInput(sample), top)].min())
    for _ in range(LOWERINGS):
        if _reaching(x, border) >= enough:
            break
        border = 0.8 * border
    return _border(border)


def bisected_border(given: EFInput, count: int) -> Tensor:
    x = given.total()
    if not x.numel():
        return _border(0.0)
    high = _top(x)
    low = min(_summed(_sums, x, 3)[0] / x.numel(), high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reach = _reaching(x, middle)
        if count <= reach <= 2 * count:
            return _border(middle)
        low, high = (low, middle) if reach < count else (middle, high)
    return _border(low)


def excess_border(given: EFInput, shares: Sequence[float]) -> Tensor:
    x = given.total()
    if not x.numel():
        return _border(0.0)
    border, top = 0.0, _top(x)
    for share in shares:
        least = np.float32(border)
        total, reach = _summed(partial(_above, least), x, 2)
        over = max(total / reach - float(least), 0.0)
        border = min(border - over * math.log(share), top)
    return _border(border)


def normal_border(given: EFInput, spread: float, count: int, rounds: int) -> Tensor:
    x = given.total()
    if not x.numel():
        return _border(0.0)
    _, total, square = _summed(_sums, x, 3)
    mean = total / x.numel()
    border = abs(mean) + spread * math.sqrt(max(0.0, square / x.numel() - mean * mean))
    for _ in range(rounds):
        reach = _reaching(x, border)
        if 2 * count <= 3 * reach <= 4 * count:
            break
        border = border / 2 if 3 * reach < 2 * count else border * 1.5
    return _border(min(border, _top(x)))
