"""Selection by magnitude without a sort (definition: kernels/reference/select.py).

A sample or a histogram gives a threshold, one pass finds the candidates, and `np.partition` picks
among them.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled, inlined
from gradwire.kernels.cpu.threads import in_slices
from gradwire.types import EFInput

# Bins by exponent and four bits of the mantissa: magnitudes of a bin differ by at most 6 %.
SHIFT = 19
BINS = 1 << (31 - SHIFT)

# Entries that stay in the cache between addition and search.
BLOCK = 1024

# The smallest positive float32.
SMALLEST = np.float32(1e-45)

# Distance of sampled entries: odd, so that a sample does not follow a column of a matrix.
STRIDE = 61


@compiled
def _histogram(bits: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
    # Four tables, since adjacent entries often share a bin, and increments of it would be serial.
    whole = bits.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, (bits[i] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[1, (bits[i + 1] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[2, (bits[i + 2] & 0x7FFFFFFF) >> SHIFT] += 1
        counts[3, (bits[i + 3] & 0x7FFFFFFF) >> SHIFT] += 1
    for i in range(whole, bits.size):
        counts[0, (bits[i] & 0x7FFFFFFF) >> SHIFT] += 1


@compiled
def _at_least(bits: NDArray[np.int32], threshold: int, out: NDArray[np.int64]) -> int:
    found = 0
    for i in range(bits.size):
        # Always written, and overwritten if it does not count: no branch to mispredict.
        out[found] = i
        found += (bits[i] & 0x7FFFFFFF) >= threshold
    return found


@compiled
def _filter(
    candidates: NDArray[np.int64],
    magnitude_bits: NDArray[np.int32],
    threshold: int,
    equal: int,
    out: NDArray[np.int64],
) -> None:
    """Writes the candidates above the threshold, and the first `equal` of those equal to it."""
    found = 0
    for i in range(candidates.size):
        if magnitude_bits[i] > threshold or (magnitude_bits[i] == threshold and equal > 0):
            equal -= magnitude_bits[i] == threshold
            out[found] = candidates[i]
            found += 1


@inlined
def _find_in(flags: NDArray[np.uint8], start: int, out: NDArray[np.int64], found: int) -> int:
    """Writes the positions of set flags plus `start` to out[found:]; returns the new count."""
    # Tests eight at a time, since most are clear.
    words = flags.view(np.uint64)
    for word in range(words.size):
        if words[word]:
            for i in range(8 * word, 8 * word + 8):
                # Always written, and overwritten if it does not count: no branch to mispredict.
                out[found] = start + i
                found += flags[i]
    return found


@compiled
def _add_and_find(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    decay: np.float32,
    residual_out: NDArray[np.float32],
    threshold: np.float32,
    out: NDArray[np.int64],
) -> int:
    # Buffers the sums, since `residual_out` may be the residual: so the loop can be vectorized.
    totals, flags = np.empty(BLOCK, dtype=np.float32), np.zeros(BLOCK, dtype=np.uint8)
    found = 0
    for start in range(0, x.size, BLOCK):
        stop = start + BLOCK
        grad, kept, sums = x[start:stop], residual[start:stop], residual_out[start:stop]
        for i in range(grad.size):
            total = grad[i] + decay * kept[i]
            totals[i] = total
            # Written so that NaN, which counts as the largest, is found.
            flags[i] = not abs(total) < threshold
        for i in range(grad.size):
            sums[i] = totals[i]
        flags[grad.size :] = 0
        found = _find_in(flags, start, out, found)
    return found


@compiled
def _find(x: NDArray[np.float32], threshold: np.float32, out: NDArray[np.int64]) -> int:
    flags = np.zeros(BLOCK, dtype=np.uint8)
    found = 0
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for i in range(part.size):
            flags[i] = not abs(part[i]) < threshold
        flags[part.size :] = 0
        found = _find_in(flags, start, out, found)
    return found


def _find_above(ef: EFInput, threshold: np.float32) -> NDArray[np.int64]:
    """Returns the positions of magnitudes of the sum that reach the threshold, which is above 0."""
    if ef.residual is None or ef.residual_out is None:
        total = ef.total().numpy()
        return _find_in_slices(
            lambda s, out: _find(total[s], threshold, out), total.size, total.size
        )
    x, residual, residual_out = (
        ef.grad.numpy(),
        ef.residual.numpy(),
        ef.residual_out.numpy(),
    )
    decay = np.float32(ef.decay)
    return _find_in_slices(
        lambda s, out: _add_and_find(x[s], residual[s], decay, residual_out[s], threshold, out),
        x.size,
        x.size,
    )


def _find_in_slices(
    find: Callable[[slice, NDArray[np.int64]], int], size: int, most: int
) -> NDArray[np.int64]:
    """Returns the positions that `find` finds in all slices.

    It writes them to its second argument and returns their number; `most` bounds the total.
    """

    def loop(start: int, stop: int) -> NDArray[np.int64]:
        # One more, since the element after the last position is written, too.
        out = np.empty(min(stop - start, most) + 1, dtype=np.int64)
        found = out[: find(slice(start, stop), out)]
        found += start
        return found

    parts = in_slices(loop, size)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def select_largest(ef: EFInput, count: int) -> Tensor:
    x, residual, residual_out, decay = ef
    expected = count // STRIDE
    if residual is None or residual_out is None or expected < 50 or count >= x.numel():
        return _select_by_histogram(ef.total(), count)
    # A sample estimates the threshold. An estimate that is too low costs a little time, one that is
    # too high is detected: the result is exact either way.
    sample = torch.add(x[::STRIDE], residual[::STRIDE], alpha=decay).abs_().numpy()
    position = sample.size - min(sample.size, int(1.1 * expected + 3 * expected**0.5))
    candidates = _find_above(ef, max(np.partition(sample, position)[position], SMALLEST))
    if candidates.size < count:
        return _select_by_histogram(residual_out, count)
    return _select_candidates(residual_out.view(torch.int32).numpy(), candidates, count)


def select_above(ef: EFInput, threshold: Tensor) -> Tensor:
    # At least the smallest number, so that zeros are never selected. Copied, so that the buffer for
    # all entries is freed.
    return torch.from_numpy(_find_above(ef, max(np.float32(threshold.item()), SMALLEST)).copy())


def _select_by_histogram(x: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` largest, found by a histogram."""
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()))
    bits = x.view(torch.int32).numpy()

    def histogram(start: int, stop: int) -> NDArray[np.int64]:
        counts = np.zeros((4, BINS), dtype=np.int64)
        _histogram(bits[start:stop], counts)
        return counts.sum(0)

    above = np.sum(in_slices(histogram, bits.size), axis=0)[::-1].cumsum()[::-1]
    lowest_bin = int(np.flatnonzero(above >= count)[-1])
    candidates = _find_in_slices(
        lambda s, out: _at_least(bits[s], lowest_bin << SHIFT, out), bits.size, above[lowest_bin]
    )
    return _select_candidates(bits, candidates, count)


def _select_candidates(
    bits: NDArray[np.int32], candidates: NDArray[np.int64], count: int
) -> Tensor:
    """Returns the `count` largest of the candidates, which must include all of these."""
    magnitude_bits = bits[candidates] & 0x7FFFFFFF
    threshold = int(
        np.partition(magnitude_bits, magnitude_bits.size - count)[magnitude_bits.size - count]
    )
    out = np.empty(count, dtype=np.int64)
    _filter(
        candidates, magnitude_bits, threshold, count - int((magnitude_bits > threshold).sum()), out
    )
    return torch.from_numpy(out)
