"""Threshold from statistics, by the steps of kernels/reference/thresholds.py in float64.

Where the reference counts how many entries reach a threshold, the magnitude of a rank is enough: at
least `rank` entries reach any value not above the rank-th largest. While that magnitude is only
bounded, a threshold between the bounds stays undecided.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.threshold.histogram import (
    FINE_BINS,
    LEVELS,
    LIMIT,
    LOWER,
    OVER_LIMIT,
    SAMPLE,
    THRESHOLD,
    THRESHOLD_F64,
    UNDECIDED,
    UPPER,
    bounds,
)


@triton.jit
def float32_bits(value):
    """Returns a float64 as the bits of the nearest float32, as int64."""
    return value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def sum_of(sums_ptr, programs, SPAN: tl.constexpr):
    i = tl.arange(0, SPAN)
    return tl.sum(tl.load(sums_ptr + i, mask=i < programs, other=0).to(tl.float64))


@triton.jit
def max_of(maxima_ptr, programs, SPAN: tl.constexpr):
    """Returns the largest magnitude as float64."""
    i = tl.arange(0, SPAN)
    largest = tl.max(tl.load(maxima_ptr + i, mask=i < programs, other=0), 0)
    return largest.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def as_float64(bits):
    """Returns the float64 with these bits: as a number, Triton would round it to float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _is_inside(first, last, threshold):
    return (first < threshold) & (threshold <= last)


@triton.jit
def _bisected(state_ptr, low, high, ROUNDS: tl.constexpr):
    lower_first, lower_last = bounds(state_ptr, LOWER)
    upper_first, upper_last = bounds(state_ptr, UPPER)
    done = high < 0
    ambiguous = high < 0
    for _ in range(ROUNDS):
        middle = (low + high) * 0.5
        threshold = float32_bits(middle)
        ambiguous |= ~done & (
            _is_inside(lower_first, lower_last, threshold)
            | _is_inside(upper_first, upper_last, threshold)
        )
        too_few, too_many = lower_last < threshold, upper_first >= threshold
        # A threshold that fits becomes the lower end, and the search stops.
        low = tl.where(~done & ~too_few, middle, low)
        high = tl.where(~done & too_few, middle, high)
        done |= ~too_few & ~too_many
    return low, ambiguous


@triton.jit
def _rescaled(state_ptr, threshold, ROUNDS: tl.constexpr):
    lower_first, lower_last = bounds(state_ptr, LOWER)
    upper_first, upper_last = bounds(state_ptr, UPPER)
    ambiguous = threshold < 0
    low, high = threshold * 0.0, threshold * 0.0 + float("inf")
    done = threshold < 0
    for _ in range(ROUNDS):
        bits = float32_bits(threshold)
        ambiguous |= _is_inside(lower_first, lower_last, bits) | _is_inside(
            upper_first, upper_last, bits
        )
        too_few, too_many = lower_last < bits, upper_first >= bits
        low = tl.where(too_many, threshold, low)
        high = tl.where(too_few, threshold, high)
        done = ~too_few & ~too_many
        # Without a lower bound this halves the threshold.
        other = tl.where(high < float("inf"), (low + high) * 0.5, threshold * 1.5)
        threshold = tl.where(done, threshold, other)
    return tl.where(~done & (low > 0) & (high < float("inf")), low, threshold), ambiguous


@triton.jit
def _lowered(state_ptr, threshold, ROUNDS: tl.constexpr):
    lower_first, lower_last = bounds(state_ptr, LOWER)
    ambiguous = threshold < 0
    for _ in range(ROUNDS):
        bits = float32_bits(threshold)
        ambiguous |= _is_inside(lower_first, lower_last, bits)
        threshold = tl.where(lower_last < bits, threshold * 0.8, threshold)
    return threshold, ambiguous


@triton.jit
def _undecided_for_sample(state_ptr, level):
    """Returns the intervals to narrow while the sample's threshold is undecided, or 0.

    If one pass suffices for each interval, the others wait for it: mostly they need none. Before
    the last pass there is nothing to wait for.
    """
    start, end = bounds(state_ptr, SAMPLE)
    lower_first, lower_last = bounds(state_ptr, LOWER)
    limit_first, limit_last = bounds(state_ptr, LIMIT)
    widest = tl.maximum(tl.maximum(end - start, lower_last - lower_first), limit_last - limit_first)
    can_wait = (widest < FINE_BINS) & (level + 1 < LEVELS)
    undecided = tl.where(can_wait, tl.where(limit_last >= start, 12, 8), 15)
    return tl.where(start < end, undecided, 0)


@triton.jit
def store_threshold(state_ptr, threshold):
    tl.store(state_ptr + THRESHOLD, float32_bits(threshold))
    tl.store(state_ptr + THRESHOLD_F64, threshold.to(tl.int64, bitcast=True))


@triton.jit
def store_outcome(state_ptr, threshold, undecided):
    """Stores the threshold, whether too many reach it, and which intervals are undecided."""
    first, last = bounds(state_ptr, LIMIT)
    # Zeros are never selected.
    least = tl.maximum(float32_bits(threshold), 1)
    over_limit = first >= least
    # The cut-off rank must be known exactly. If only it is open, narrow no other interval.
    limit_open = tl.where(over_limit, first < last, last >= least)
    store_threshold(state_ptr, threshold)
    tl.store(state_ptr + OVER_LIMIT, over_limit.to(tl.int64))
    tl.store(
        state_ptr + UNDECIDED,
        tl.where(undecided != 0, undecided, tl.where(limit_open, 4, 0)).to(tl.int64),
    )


@triton.jit
def solve_threshold(
    state_ptr, sums_ptr, maxima_ptr, numel, programs, factor, level, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Computes the threshold of a kind from the intervals and the sums of all programs.

    `level` is that of the next pass with finer bins.
    """
    if KIND == "sampled":
        start, _ = bounds(state_ptr, SAMPLE)
        threshold = start.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
        threshold, ambiguous = _lowered(state_ptr, threshold, ROUNDS)
        sample_undecided = _undecided_for_sample(state_ptr, level)
        store_outcome(
            state_ptr,
            threshold,
            tl.where(sample_undecided != 0, sample_undecided, tl.where(ambiguous, 7, 0)),
        )
    else:
        largest = max_of(maxima_ptr, programs, SPAN)
        mean = sum_of(sums_ptr, programs, SPAN) / numel
        if KIND == "bisected":
            threshold, ambiguous = _bisected(state_ptr, tl.minimum(mean, largest), largest, ROUNDS)
        elif KIND == "normal":
            square = sum_of(sums_ptr + programs, programs, SPAN) / numel
            deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
            threshold = tl.abs(mean) + as_float64(factor) * deviation
            threshold, ambiguous = _rescaled(state_ptr, threshold, ROUNDS)
            threshold = tl.minimum(threshold, largest)
        else:
            threshold, ambiguous = tl.minimum(mean * as_float64(factor), largest), largest < 0
        if KIND == "excess":
            # Later stages raise the threshold; only then the entries that reach it are counted.
            store_threshold(state_ptr, threshold)
        else:
            store_outcome(state_ptr, threshold, tl.where(ambiguous, 7, 0))
