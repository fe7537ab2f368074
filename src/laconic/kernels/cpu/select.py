"""The entries of largest magnitude, by counting instead of sorting."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled

# Exponent and four bits of mantissa: bins within 6 % of each other in magnitude.
SHIFT = 19
BINS = 1 << (31 - SHIFT)


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
    bits: NDArray[np.int32],
    candidates: NDArray[np.int64],
    border: int,
    equal: int,
    out: NDArray[np.int64],
) -> None:
    """Keeps the candidates above the border, and the first `equal` of those on it."""
    found = 0
    for i in candidates:
        size = bits[i] & 0x7FFFFFFF
        if size > border or (size == border and equal > 0):
            equal -= size == border
            out[found] = i
            found += 1


def largest(x: Tensor, count: int) -> Tensor:
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()))
    bits = x.view(torch.int32).numpy()
    counts = np.zeros((4, BINS), dtype=np.int64)
    _histogram(bits, counts)
    above = counts.sum(0)[::-1].cumsum()[::-1]
    edge = int(np.flatnonzero(above >= count)[-1])
    candidates = np.empty(above[edge] + 1, dtype=np.int64)
    candidates = candidates[: _at_least(bits, edge << SHIFT, candidates)]
    sizes = bits[candidates] & 0x7FFFFFFF
    border = int(np.partition(sizes, sizes.size - count)[sizes.size - count])
    out = np.empty(count, dtype=np.int64)
    _thin(bits, candidates, border, count - int((sizes > border).sum()), out)
    return torch.from_numpy(out)
