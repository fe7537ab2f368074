"""Predicted bounds of the later thresholds, and a spill buffer of the entries inside them.

A sample predicts where the thresholds of a multistage search will lie. The first pass writes the
entries inside those bounds to the spill buffer and sums up those above, so the sum above a later
threshold needs no pass over memory. Where a threshold lies outside its bounds, or the buffer was
too small, there is one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.histogram import PREDICTED_BOUNDS, RESCANS
from gradwire.kernels.cuda.threshold.passes import (
    TILE,
    finite_or_zero,
    grid_of,
    thread_sums,
    to_float64,
)

PREDICTED = tl.constexpr(2)
"""Number of predicted thresholds: later ones need a pass over memory each."""
DEVIATIONS = tl.constexpr(3.0)
"""Standard deviations of the sample's fit, to either side of a threshold."""


@triton.jit
def _bits(value):
    """Returns a float64 as the bits of a magnitude above zero, as int64."""
    bits = tl.maximum(value, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(bits, 1).to(tl.int64)


@triton.jit
def _fit(value, here, threshold, stage_factor):
    """Returns how far the sample above a threshold raises it, and the variance of that."""
    here &= value >= threshold
    reach = tl.sum(here.to(tl.float64))
    excess = tl.where(here, value - threshold, 0.0)
    mean = tl.sum(excess) / reach
    variance = tl.maximum(tl.sum(excess * excess) / reach - mean * mean, 0.0) / reach
    return stage_factor * mean, stage_factor * stage_factor * variance


@triton.jit
def predict_bounds(state_ptr, sizes, factor, stage_factor):
    """Stores the predicted bounds of the first two thresholds; a size below 0 is no entry."""
    here = sizes >= 0
    value = to_float64(finite_or_zero(tl.maximum(sizes, 0)))
    top = tl.max(value, 0)
    threshold = top * 0.0
    total_variance = threshold
    for interval in tl.static_range(PREDICTED):
        scale = (
            (factor if interval == 0 else stage_factor).to(tl.int64).to(tl.float64, bitcast=True)
        )
        excess, variance = _fit(value, here, threshold, scale)
        threshold = tl.minimum(threshold + excess, top)
        total_variance += variance
        margin = DEVIATIONS * tl.sqrt(total_variance)
        tl.store(state_ptr + PREDICTED_BOUNDS + 2 * interval, _bits(threshold - margin))
        tl.store(state_ptr + PREDICTED_BOUNDS + 2 * interval + 1, _bits(threshold + margin))


@triton.jit
def predicted_bounds(state_ptr, interval):
    """Returns the predicted bounds of a threshold, the upper one exclusive, as int32."""
    ptr = state_ptr + PREDICTED_BOUNDS + 2 * interval
    return tl.load(ptr).to(tl.int32), tl.load(ptr + 1).to(tl.int32)


def uses_spill_buffer(stage_factors: Sequence[int], numel: int) -> bool:
    """Returns whether a spill buffer pays off: not for small tensors, whose passes are short."""
    return len(stage_factors) > 0 and grid_of(numel)[1] > 1


COLUMNS = tl.constexpr(256)
"""Threads of a program, each of which has its own column of the buffer."""
ROWS = tl.constexpr(8)
"""Rows of all columns that are read at once."""


class SpillBuffer(NamedTuple):
    values: Tensor
    """Magnitudes, as bits: `capacity` rows of columns per program."""
    used: Tensor
    """Number of entries in each column."""
    above: Tensor
    """Per program: the sums of the magnitudes above either bound, and their numbers."""
    capacity: int


@triton.jit
def empty_spill(state_ptr):
    """Returns zero sums, counts and column fills, and the predicted bounds."""
    total, count = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.int32)
    low_first, high_first = predicted_bounds(state_ptr, 0)
    low_second, high_second = predicted_bounds(state_ptr, 1)
    return (total, count, total, count, count), (low_first, high_first, low_second, high_second)


@triton.jit
def spill_tile(values_ptr, size, spill, bounds, CAPACITY: tl.constexpr):
    """Adds the finite magnitudes (bits) of a tile, if there is a buffer."""
    sum_first, count_first, sum_second, count_second, used = spill
    if CAPACITY:
        low_first, high_first, low_second, high_second = bounds
        above_first, above_second = size >= high_first, size >= high_second
        sum_first, count_first = (
            sum_first + thread_sums(tl.where(above_first, to_float64(size), 0.0)),
            count_first + _count(above_first),
        )
        sum_second, count_second = (
            sum_second + thread_sums(tl.where(above_second, to_float64(size), 0.0)),
            count_second + _count(above_second),
        )
        inside = _between(size, low_first, high_first) | _between(size, low_second, high_second)
        used = _write(values_ptr, size, inside, used, CAPACITY)
    return sum_first, count_first, sum_second, count_second, used


@triton.jit
def _between(size, low, end):
    return (size - low).to(tl.uint32) < (end - low).to(tl.uint32)


@triton.jit
def _count(here):
    return thread_sums(here.to(tl.int32))


@triton.jit
def _write(values_ptr, size, here, used, CAPACITY: tl.constexpr):
    """Appends the entries `here` to the columns; returns the new number of entries in each.

    Threads do not wait for each other: each counts the preceding ones among its 4 by 4 entries.
    """
    LANES: tl.constexpr = size.shape[1]
    row, lane = tl.arange(0, 4)[:, None] * 8, tl.arange(0, 4)[None, :] * 8
    lane_counts, row_prefix = _prefixes(tl.sum(here.to(tl.int32) << row, axis=0))
    added, lane_prefix = _prefixes(tl.sum(tl.reshape(lane_counts, (COLUMNS, 4)) << lane, axis=1))
    before = tl.reshape(used[:, None] + ((lane_prefix[:, None] >> lane) & 0xFF), (LANES,))
    # A full column may be overwritten: its entries will not be used.
    offset = tl.minimum(before, CAPACITY - 4) * COLUMNS + tl.arange(0, LANES) // 4
    start_ptr = values_ptr + tl.program_id(0).to(tl.int64) * COLUMNS * CAPACITY
    at_ptr = (start_ptr + offset)[None, :] + ((row_prefix[None, :] >> row) & 0xFF) * COLUMNS
    # The hint is wrong, but it makes the compiler leave entries in the threads that loaded them.
    # Stores whose mask differs by entry are written one by one in any case.
    at_ptr = tl.max_contiguous(tl.multiple_of(at_ptr, [1, 16]), [1, 4])
    tl.store(at_ptr, size, mask=here)
    return used + added


@triton.jit
def _prefixes(packed):
    """Returns the sum of the four bytes of a word, and the exclusive prefix sums."""
    inclusive = packed * 0x01010101
    return inclusive >> 24, inclusive - packed


@triton.jit
def store_spill(above_ptr, used_ptr, spill, CAPACITY: tl.constexpr):
    """Stores this program's sums and counts for later launches."""
    if CAPACITY:
        sum_first, count_first, sum_second, count_second, used = spill
        ptr, programs = above_ptr + tl.program_id(0), tl.num_programs(0)
        tl.store(ptr, tl.sum(sum_first))
        tl.store(ptr + programs, tl.sum(sum_second))
        tl.store(ptr + 2 * programs, tl.sum(count_first).to(tl.float64))
        tl.store(ptr + 3 * programs, tl.sum(count_second).to(tl.float64))
        tl.store(used_ptr + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), used)


@triton.jit
def covers(state_ptr, used_ptr, program, interval, threshold, CAPACITY: tl.constexpr):
    """Returns whether a program's spilled entries suffice for a threshold (bits); counts if not."""
    first, end = predicted_bounds(state_ptr, interval)
    used = tl.max(tl.load(used_ptr + program * COLUMNS + tl.arange(0, COLUMNS)), 0)
    covered = (first <= threshold) & (threshold <= end) & (used <= CAPACITY - 4)
    tl.atomic_add(state_ptr + RESCANS, tl.full((), 1, tl.int64), mask=~covered, sem="relaxed")
    return covered


@triton.jit
def sum_spilled(
    values_ptr, used_ptr, above_ptr, state_ptr, program, interval, threshold, CAPACITY: tl.constexpr
):  # fmt: skip
    """Returns sum (float64) and number of a program's magnitudes that reach a threshold (bits)."""
    _, end = predicted_bounds(state_ptr, interval)
    column = tl.arange(0, COLUMNS)
    used = tl.load(used_ptr + program * COLUMNS + column)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    remaining = tl.max(used, 0)
    while remaining > 0:
        at = program.to(tl.int64) * COLUMNS * CAPACITY + row * COLUMNS + column[None, :]
        size = tl.load(values_ptr + at, mask=row < used[None, :], other=0)
        # Entries from `end` on are in the sums already, and a threshold is above zero.
        here = (size >= threshold) & (size < end)
        total += tl.where(here, to_float64(size), 0.0)
        count += here.to(tl.int32)
        row += ROWS
        remaining -= ROWS
    ptr, programs = above_ptr + program, tl.num_programs(0)
    sum_above, count_above = (
        tl.load(ptr + interval * programs),
        tl.load(ptr + (2 + interval) * programs),
    )
    return sum_above + tl.sum(total), count_above.to(tl.int32) + tl.sum(count)


def new_spill_buffer(x: Tensor, stage_factors: Sequence[int]) -> SpillBuffer:
    """Allocates capacity for a tenth of the entries of each thread plus 16; none if not needed."""
    programs, tiles = grid_of(x.numel())
    needed = uses_spill_buffer(stage_factors, x.numel())
    columns = programs * COLUMNS.value if needed else 0
    capacity = tiles * TILE // COLUMNS.value // 10 + 16 if needed else 0
    values = torch.empty(columns * capacity, dtype=torch.int32, device=x.device)
    used = torch.empty(columns, dtype=torch.int32, device=x.device)
    above = torch.empty(4 if needed else 0, programs, dtype=torch.float64, device=x.device)
    return SpillBuffer(values, used, above, capacity)
