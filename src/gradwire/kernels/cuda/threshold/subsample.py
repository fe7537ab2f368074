"""Histogram of a random subsample: each program counts the sampled entries of its own range.

The positions follow from the key, so nothing is stored between two passes, and a pass that has just
written its range finds the entries in the cache.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.random import stratum
from gradwire.kernels.cuda.threshold.histogram import (
    BINS,
    COARSE_RANGE,
    COARSE_SHIFT,
    FINE_BINS,
    INTERVALS,
    SAMPLE,
    SAMPLE_BINS,
    add_to_histogram,
    bin_shift,
    bounds,
    fine_bins_ptr,
    is_contended,
)
from gradwire.kernels.cuda.threshold.passes import finite_or_zero, magnitude

BLOCK = tl.constexpr(256)


@triton.jit
def _stratum_of(index, numel, sample_size):
    """Returns the number of the stratum that contains an entry."""
    return ((index + 1) * sample_size - 1) // numel


@triton.jit
def _load_sample(x_ptr, i, last, start, end, numel, sample_size, key_low, key_high):
    """Returns the magnitudes of sampled entries from stratum i on, and which are in the range."""
    stratum_index = i + tl.arange(0, BLOCK)
    index = stratum(stratum_index, numel, sample_size, key_low, key_high)
    here = (stratum_index <= last) & (index >= start) & (index < end)
    return finite_or_zero(magnitude(tl.load(x_ptr + index, mask=here, other=0.0))), here


@triton.jit
def count_sample(x_ptr, state_ptr, start, end, numel, sample_size, key_low, key_high):
    """Counts the sampled entries from `start` to `end` by the first bins."""
    first = bounds(state_ptr, SAMPLE)[0].to(tl.int32)
    i, last = _stratum_of(start, numel, sample_size), _stratum_of(end - 1, numel, sample_size)
    while i <= last:
        size, here = _load_sample(x_ptr, i, last, start, end, numel, sample_size, key_low, key_high)
        marked = here & (size >= first)
        near = marked & (size - first < COARSE_RANGE)
        above = tl.sum((marked & ~near).to(tl.int64))
        tl.atomic_add(state_ptr + INTERVALS + 4 * SAMPLE + 2, above, mask=above > 0, sem="relaxed")
        contended = is_contended(size, near, first, COARSE_SHIFT)
        add_to_histogram(state_ptr + SAMPLE_BINS, size, near, first, COARSE_SHIFT, contended, BINS)
        i += BLOCK


@triton.jit
def recount_sample(x_ptr, state_ptr, level, start, end, numel, sample_size, key_low, key_high):
    """Counts the sampled entries inside the bounds by finer bins."""
    first, last_size = bounds(state_ptr, SAMPLE)
    if first < last_size:
        shift = bin_shift(first, last_size, FINE_BINS).to(tl.int32)
        i, last = _stratum_of(start, numel, sample_size), _stratum_of(end - 1, numel, sample_size)
        while i <= last:
            size, here = _load_sample(
                x_ptr, i, last, start, end, numel, sample_size, key_low, key_high
            )
            inside = here & (size >= first) & (size <= last_size)
            bins_ptr = fine_bins_ptr(state_ptr, level, SAMPLE)
            first_size = first.to(tl.int32)
            contended = is_contended(size, inside, first_size, shift)
            add_to_histogram(bins_ptr, size, inside, first_size, shift, contended, FINE_BINS)
            i += BLOCK
