"""Histogram of a random subsample: each program counts the sampled entries of its own range.

The positions follow from the key, so nothing is stored between two passes, and a pass that has just
written its range finds the entries in the cache.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.random import stratum
from gradwire.kernels.cuda.threshold.histogram import (
    BINS,
    BRACKETS,
    COARSE,
    DRAWN,
    FINE,
    NEAR,
    SAMPLE,
    bounds,
    fine_row,
    is_crowd,
    tally,
    width,
)
from gradwire.kernels.cuda.threshold.passes import finite, magnitude

BLOCK = tl.constexpr(256)


@triton.jit
def _first(place, numel, tried):
    """The number of the stratum that an entry lies in."""
    return ((place + 1) * tried - 1) // numel


@triton.jit
def _some(x_ptr, i, last, start, end, numel, tried, key_low, key_high):
    """Magnitudes of the drawn from number i on, as far as they are in the stretch."""
    number = i + tl.arange(0, BLOCK)
    place = stratum(number, numel, tried, key_low, key_high)
    here = (number <= last) & (place >= start) & (place < end)
    return finite(magnitude(tl.load(x_ptr + place, mask=here, other=0.0))), here


@triton.jit
def count_drawn(x_ptr, state_ptr, start, end, numel, tried, key_low, key_high):
    """Counts the drawn entries from `start` to `end` by the first bins."""
    first = bounds(state_ptr, SAMPLE)[0].to(tl.int32)
    i, last = _first(start, numel, tried), _first(end - 1, numel, tried)
    while i <= last:
        size, here = _some(x_ptr, i, last, start, end, numel, tried, key_low, key_high)
        marked = here & (size >= first)
        near = marked & (size - first < NEAR)
        above = tl.sum((marked & ~near).to(tl.int64))
        tl.atomic_add(state_ptr + BRACKETS + 4 * SAMPLE + 2, above, mask=above > 0, sem="relaxed")
        crowd = is_crowd(size, near, first, COARSE)
        tally(state_ptr + DRAWN, size, near, first, COARSE, crowd, BINS)
        i += BLOCK


@triton.jit
def recount_drawn(x_ptr, state_ptr, level, start, end, numel, tried, key_low, key_high):
    """The same inside the bounds, by finer bins."""
    first, last_size = bounds(state_ptr, SAMPLE)
    if first < last_size:
        shift = width(first, last_size, FINE).to(tl.int32)
        i, last = _first(start, numel, tried), _first(end - 1, numel, tried)
        while i <= last:
            size, here = _some(x_ptr, i, last, start, end, numel, tried, key_low, key_high)
            inside = here & (size >= first) & (size <= last_size)
            bins_ptr = fine_row(state_ptr, level, SAMPLE)
            least = first.to(tl.int32)
            crowd = is_crowd(size, inside, least, shift)
            tally(bins_ptr, size, inside, least, shift, crowd, FINE)
            i += BLOCK
