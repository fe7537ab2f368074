"""The entries of largest magnitude, by counting instead of sorting."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled

# Exponent and four bits of mantissa: bins within 6 % of each other in magnitude.
SHIFT = 19
BINS = 1 << (31 - SHIFT)

# Odd, so that the sample does not walk along a column of a matrix.
STRIDE = 61


@compiled
def _histogram(bits: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
    # Four tables, since neighbours often fall into one bin and would wait for each other.
    whole = bits.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, (bits[i] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[1, (bits[i + 1] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[2, (bits[i + 2] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[3, (bits[i + 3] & 0x7FFFFFFF) >> SHIFT] += 1
    for i in range(whole, bits.size):
        counts[0, (bits[i] & 0x7FFFFFFF) >> SHIFT] += 1


@compiled
def _at_least(bits: NDArray[np.int32], border: int, out: NDArray[np.int64]) -> int:
    found = 0
    for i in range(bits.size):
        # Written always, kept only if it counts: no branch to mispredict.
        out[found] = i
        found += (bits[i] & 0x7FFFFFFF) >= border
    return found


@compiled
def _thin(
    candidates: NDArray[np.int64],
    sizes: NDArray[np.int32],
    border: int,
    equal: int,
    out: NDArray[np.int64],
) -> None:
    """Keeps the candidates above the border, and the first `equal` of those on it."""
    found = 0
    for i in range(candidates.size):
        if sizes[i] > border or (sizes[i] == border and equal > 0):
            equal -= sizes[i] == border
            out[found] = candidates[i]
            found += 1


@compiled
def _add_and_find(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    decay: np.float32,
    left: NDArray[np.float32],
    guess: np.float32,
    out: NDArray[np.int64],
) -> int:
    found = 0
    for i in range(x.size):
        total = x[i] + decay * residual[i]
        left[i] = total
        out[found] = i
        # Written so that NaN, the largest of all, is found too.
        found += not abs(total) < guess
    return found


def largest(x: Tensor, count: int) -> Tensor:
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()))
    bits = x.view(torch.int32).numpy()
    counts = np.zeros((4, BINS), dtype=np.int64)
    _histogram(bits, counts)
    above = counts.sum(0)[::-1].cumsum()[::-1]
    edge = int(np.flatnonzero(above >= count)[-1])
    candidates = np.empty(above[edge] + 1, dtype=np.int64)
    return _exactly(bits, candidates[: _at_least(bits, edge << SHIFT, candidates)], count)


def largest_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor, count: int) -> Tensor:
    expected = count // STRIDE
    if expected < 50 or count >= x.numel():
        return largest(torch.add(x, residual, alpha=decay, out=left), count)
    # A sample tells about where the border is. A guess that is too low costs a little, one that is
    # too high is noticed: the result is exact either way.
    sample = torch.add(x[::STRIDE], residual[::STRIDE], alpha=decay).abs_().numpy()
    rank = sample.size - min(sample.size, int(1.1 * expected + 3 * expected**0.5))
    guess = np.partition(sample, rank)[rank]
    candidates = np.empty(x.numel() + 1, dtype=np.int64)
    found = _add_and_find(
        x.numpy(), residual.numpy(), np.float32(decay), left.numpy(), guess, candidates
    )
    if found < count:
        return largest(left, count)
    return _exactly(left.view(torch.int32).numpy(), candidates[:found], count)


def _exactly(bits: NDArray[np.int32], candidates: NDArray[np.int64], count: int) -> Tensor:
    """The `count` largest of candidates that hold them all."""
    sizes = bits[candidates] & 0x7FFFFFFF
    border = int(np.partition(sizes, sizes.size - count)[sizes.size - count])
    out = np.empty(count, dtype=np.int64)
    _thin(candidates, sizes, border, count - int((sizes > border).sum()), out)
    return torch.from_numpy(out)
