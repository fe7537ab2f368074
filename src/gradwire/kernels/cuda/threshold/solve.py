"""Threshold from statistics, by the steps of kernels/reference/thresholds.py in float64.

Where the reference counts how many entries reach a threshold, the magnitude of a rank is enough: at
least `rank` entries reach any value not above the rank-th largest. While that magnitude is only
bounded, a threshold between the bounds stays undecided.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.threshold.histogram import (
    BORDER,
    CUT,
    EXACT,
    FEW,
    FINE,
    LEVELS,
    MANY,
    MOST,
    OPEN,
    SAMPLE,
    bounds,
)


@triton.jit
def rounded(value):
    """A float64 as the bits of the nearest float32, as int64."""
    return value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def sum_of(sums_ptr, programs, SPAN: tl.constexpr):
    i = tl.arange(0, SPAN)
    return tl.sum(tl.load(sums_ptr + i, mask=i < programs, other=0).to(tl.float64))


@triton.jit
def top_of(tops_ptr, programs, SPAN: tl.constexpr):
    """The largest magnitude as float64."""
    i = tl.arange(0, SPAN)
    top = tl.max(tl.load(tops_ptr + i, mask=i < programs, other=0), 0)
    return top.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def double(bits):
    """The float64 of its bits: as a number, Triton would round it to float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _open(first, last, border):
    return (first < border) & (border <= last)


@triton.jit
def _bisected(state_ptr, low, high, ROUNDS: tl.constexpr):
    few_first, few_last = bounds(state_ptr, FEW)
    many_first, many_last = bounds(state_ptr, MANY)
    done = high < 0
    unsure = high < 0
    for _ in range(ROUNDS):
        middle = (low + high) * 0.5
        border = rounded(middle)
        unsure |= ~done & (
            _open(few_first, few_last, border) | _open(many_first, many_last, border)
        )
        few, many = few_last < border, many_first >= border
        # What fits is kept as the lower end, and nothing moves any more.
        low = tl.where(~done & ~few, middle, low)
        high = tl.where(~done & few, middle, high)
        done |= ~few & ~many
    return low, unsure


@triton.jit
def _rescaled(state_ptr, border, ROUNDS: tl.constexpr):
    few_first, few_last = bounds(state_ptr, FEW)
    many_first, many_last = bounds(state_ptr, MANY)
    unsure = border < 0
    for _ in range(ROUNDS):
        bits = rounded(border)
        unsure |= _open(few_first, few_last, bits) | _open(many_first, many_last, bits)
        few, many = few_last < bits, many_first >= bits
        border = tl.where(few, border * 0.5, tl.where(many, border * 1.5, border))
    return border, unsure


@triton.jit
def _lowered(state_ptr, border, ROUNDS: tl.constexpr):
    few_first, few_last = bounds(state_ptr, FEW)
    unsure = border < 0
    for _ in range(ROUNDS):
        bits = rounded(border)
        unsure |= _open(few_first, few_last, bits)
        border = tl.where(few_last < bits, border * 0.8, border)
    return border, unsure


@triton.jit
def _drawn(state_ptr, level):
    """What to ask for while the border of a sample is open: 0 if it is not.

    Where one pass is enough for each bracket, the others wait for it: mostly they need none. What
    is open before the last pass has no other to wait for.
    """
    start, end = bounds(state_ptr, SAMPLE)
    few_first, few_last = bounds(state_ptr, FEW)
    most_first, most_last = bounds(state_ptr, MOST)
    widest = tl.maximum(tl.maximum(end - start, few_last - few_first), most_last - most_first)
    can_wait = (widest < FINE) & (level + 1 < LEVELS)
    ask = tl.where(can_wait, tl.where(most_last >= start, 12, 8), 15)
    return tl.where(start < end, ask, 0)


@triton.jit
def note(state_ptr, border):
    tl.store(state_ptr + BORDER, rounded(border))
    tl.store(state_ptr + EXACT, border.to(tl.int64, bitcast=True))


@triton.jit
def settle(state_ptr, border, ask):
    """Notes the border, whether more reach it than may be chosen, and what is open."""
    first, last = bounds(state_ptr, MOST)
    # Zeros are never chosen.
    least = tl.maximum(rounded(border), 1)
    cut = first >= least
    # What is cut off must be known to the last place. If only that is open, nothing else is asked.
    more = tl.where(cut, first < last, last >= least)
    note(state_ptr, border)
    tl.store(state_ptr + CUT, cut.to(tl.int64))
    tl.store(state_ptr + OPEN, tl.where(ask != 0, ask, tl.where(more, 4, 0)).to(tl.int64))


@triton.jit
def decide(
    state_ptr, sums_ptr, tops_ptr, numel, programs, factor, level, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The border of a kind, of what the brackets and the sums of all programs tell.

    `level` is that of the next pass with finer bins.
    """
    if KIND == "sampled":
        start, _ = bounds(state_ptr, SAMPLE)
        border = start.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
        border, unsure = _lowered(state_ptr, border, ROUNDS)
        drawn = _drawn(state_ptr, level)
        settle(state_ptr, border, tl.where(drawn != 0, drawn, tl.where(unsure, 7, 0)))
    else:
        top = top_of(tops_ptr, programs, SPAN)
        mean = sum_of(sums_ptr, programs, SPAN) / numel
        if KIND == "bisected":
            border, unsure = _bisected(state_ptr, tl.minimum(mean, top), top, ROUNDS)
        elif KIND == "normal":
            square = sum_of(sums_ptr + programs, programs, SPAN) / numel
            deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
            border = tl.abs(mean) + double(factor) * deviation
            border, unsure = _rescaled(state_ptr, border, ROUNDS)
            border = tl.minimum(border, top)
        else:
            border, unsure = tl.minimum(mean * double(factor), top), top < 0
        if KIND == "excess":
            # It goes on rising, and only then it is asked how many reach it.
            note(state_ptr, border)
        else:
            settle(state_ptr, border, tl.where(unsure, 7, 0))
