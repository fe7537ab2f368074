"""Selection by magnitude, by counting, not sorting (definition: kernels/reference/select.py)."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled, inlined
from gradwire.kernels.cpu.threads import in_slices
from gradwire.types import EFInput

# Exponent and four bits of mantissa: bins within 6 % of each other in magnitude.
SHIFT = 19
BINS = 1 << (31 - SHIFT)

# Entries that stay in the cache from being added to being looked through.
BLOCK = 1024

SMALLEST = np.float32(1e-45)

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


@inlined
def _find_in(flags: NDArray[np.uint8], start: int, out: NDArray[np.int64], found: int) -> int:
    """Writes where flags are set, counted from `start`, after the `found` first."""
    # Eight at a time, since most are clear.
    words = flags.view(np.uint64)
    for word in range(words.size):
        if words[word]:
            for i in range(8 * word, 8 * word + 8):
                # Written always, kept only if it counts: no branch to mispredict.
                out[found] = start + i
                found += flags[i]
    return found


@compiled
def _add_and_find(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    decay: np.float32,
    residual_out: NDArray[np.float32],
    border: np.float32,
    out: NDArray[np.int64],
) -> int:
    # Through memory of its own, since `residual_out` may be the residual: so vector instructions can.
    totals, flags = np.empty(BLOCK, dtype=np.float32), np.zeros(BLOCK, dtype=np.uint8)
    found = 0
    for start in range(0, x.size, BLOCK):
        stop = start + BLOCK
        one, two, sum_ = x[start:stop], residual[start:stop], residual_out[start:stop]
        for i in range(one.size):
            total = one[i] + decay * two[i]
            totals[i] = total
            # Written so that NaN, the largest of all, is found too.
            flags[i] = not abs(total) < border
        for i in range(one.size):
            sum_[i] = totals[i]
        flags[one.size :] = 0
        found = _find_in(flags, start, out, found)
    return found


@compiled
def _find(x: NDArray[np.float32], border: np.float32, out: NDArray[np.int64]) -> int:
    flags = np.zeros(BLOCK, dtype=np.uint8)
    found = 0
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for i in range(part.size):
            flags[i] = not abs(part[i]) < border
        flags[part.size :] = 0
        found = _find_in(flags, start, out, found)
    return found


def _reached(given: EFInput, border: np.float32) -> NDArray[np.int64]:
    """Positions of the magnitudes of the sum that reach the border, which is above 0."""
    if given.residual is None or given.residual_out is None:
        total = given.total().numpy()
        return _gathered(lambda s, out: _find(total[s], border, out), total.size, total.size)
    x, residual, residual_out = (
        given.grad.numpy(),
        given.residual.numpy(),
        given.residual_out.numpy(),
    )
    decay = np.float32(given.decay)
    return _gathered(
        lambda s, out: _add_and_find(x[s], residual[s], decay, residual_out[s], border, out),
        x.size,
        x.size,
    )


def _gathered(
    find: Callable[[slice, NDArray[np.int64]], int], size: int, most: int
) -> NDArray[np.int64]:
    """The positions of what `find` finds in slices: it writes them and returns how many.

    There are `most` of them, or fewer.
    """

    def loop(start: int, stop: int) -> NDArray[np.int64]:
        # One more, since the place after the last that is found is written, too.
        out = np.empty(min(stop - start, most) + 1, dtype=np.int64)
        found = out[: find(slice(start, stop), out)]
        found += start
        return found

    parts = in_slices(loop, size)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def largest(given: EFInput, count: int) -> Tensor:
    x, residual, residual_out, decay = given
    expected = count // STRIDE
    if residual is None or residual_out is None or expected < 50 or count >= x.numel():
        return _counted(given.total(), count)
    # A sample tells about where the border is. A guess that is too low costs a little, one that is
    # too high is noticed: the result is exact either way.
    sample = torch.add(x[::STRIDE], residual[::STRIDE], alpha=decay).abs_().numpy()
    rank = sample.size - min(sample.size, int(1.1 * expected + 3 * expected**0.5))
    candidates = _reached(given, max(np.partition(sample, rank)[rank], SMALLEST))
    if candidates.size < count:
        return _counted(residual_out, count)
    return _exactly(residual_out.view(torch.int32).numpy(), candidates, count)


def reaching(given: EFInput, border: Tensor) -> Tensor:
    # Zeros reach no border.
    # A copy, so that memory for all entries does not live on with the few found.
    return torch.from_numpy(_reached(given, max(np.float32(border.item()), SMALLEST)).copy())


def _counted(x: Tensor, count: int) -> Tensor:
    """The `count` largest by a histogram of all."""
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()))
    bits = x.view(torch.int32).numpy()

    def counted(start: int, stop: int) -> NDArray[np.int64]:
        counts = np.zeros((4, BINS), dtype=np.int64)
        _histogram(bits[start:stop], counts)
        return counts.sum(0)

    above = np.sum(in_slices(counted, bits.size), axis=0)[::-1].cumsum()[::-1]
    edge = int(np.flatnonzero(above >= count)[-1])
    candidates = _gathered(
        lambda s, out: _at_least(bits[s], edge << SHIFT, out), bits.size, above[edge]
    )
    return _exactly(bits, candidates, count)


def _exactly(bits: NDArray[np.int32], candidates: NDArray[np.int64], count: int) -> Tensor:
    """The `count` largest of candidates that hold them all."""
    sizes = bits[candidates] & 0x7FFFFFFF
    border = int(np.partition(sizes, sizes.size - count)[sizes.size - count])
    out = np.empty(count, dtype=np.int64)
    _thin(candidates, sizes, border, count - int((sizes > border).sum()), out)
    return torch.from_numpy(out)
