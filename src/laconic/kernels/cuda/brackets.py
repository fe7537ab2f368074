"""Magnitudes of some ranks, between two bounds each that passes over memory bring together.

A pass counts the magnitudes inside the bounds by 2048 bins, and its last program goes on with the
bin that holds the rank. All that the host does not ask for is in one tensor of int64, the state.
"""

import triton
import triton.language as tl

BINS = 2048
ODD = tl.constexpr(32)
"""Entries that are no finite number. Before them, for each launch, how many programs are done."""
OPEN = tl.constexpr(33)
"""Whether the bounds are too wide to say what the border is, and whether it passes too many."""
BORDER = tl.constexpr(34)
CUT = tl.constexpr(35)
"""Whether more reach the border than may be chosen, so that the largest are."""
MISSED = tl.constexpr(36)
"""Whether a rank lies below all that was marked."""
EXACT = tl.constexpr(37)
"""The border as the bits of a float64."""
GUESS = tl.constexpr(38)
"""The magnitude from which on entries were marked first."""
BRACKETS = tl.constexpr(48)
"""Four numbers each: first and last magnitude, entries above them, and the rank."""
HEAD = 64

FEW = tl.constexpr(0)
MANY = tl.constexpr(1)
MOST = tl.constexpr(2)
SAMPLE = tl.constexpr(3)
"""Of what is a bracket: fewer than its rank are too few, or as many too many; the rest by name."""

COARSE = tl.constexpr(16)
"""log2 of the first bins: 2048 of them are 16 powers of two."""

ROWS = 14
"""Rows of bins: one that all share, four of the sample, and three times one a bracket."""
SAMPLE_ROW = tl.constexpr(1)
ROW = tl.constexpr(5)


@triton.jit
def is_last(state_ptr, launch):
    """Whether this program is the last of its launch; it sees what all others have written."""
    tl.debug_barrier()
    done = tl.atomic_add(state_ptr + launch, tl.full((), 1, tl.int64), sem="acq_rel")
    return done == tl.num_programs(0) - 1


@triton.jit
def bounds(state_ptr, bracket):
    """First and last magnitude of a bracket, as int64."""
    ptr = state_ptr + BRACKETS + 4 * bracket
    return tl.load(ptr), tl.load(ptr + 1)


@triton.jit
def width(first, last, BINS: tl.constexpr):
    """log2 of the smallest bins that are enough."""
    shift = tl.full((), 0, tl.int64)
    while ((last - first) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def tally(bins_ptr, size, inside, first, shift, BINS: tl.constexpr):
    """Counts the magnitudes inside by bins; the last bin has all beyond, too."""
    bin_ = tl.where(inside, tl.minimum((size - first) >> shift, BINS - 1), BINS)
    if tl.sum(inside.to(tl.int32)) * 8 > inside.shape[0]:
        # Often most of them are equal: those of the first bin are added all at once.
        lowest = tl.min(bin_, 0)
        equal = tl.sum((bin_ == lowest).to(tl.int64))
        tl.atomic_add(bins_ptr + lowest, equal, mask=lowest < BINS, sem="relaxed")
        inside &= bin_ != lowest
    tl.atomic_add(bins_ptr + bin_, tl.full(bin_.shape, 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def narrow(state_ptr, bracket, row, shift, numel, BINS: tl.constexpr, HEAD: tl.constexpr):
    """Goes on with the bin that holds the rank; below the first bin, if none does."""
    ptr = state_ptr + BRACKETS + 4 * bracket
    first, last, above, rank = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)
    if first < last:
        bin_ = tl.arange(0, BINS)
        held = tl.load(state_ptr + HEAD + row * BINS + bin_)
        all_ = above + tl.sum(held)
        reach = all_ - tl.cumsum(held, 0) + held
        chosen = tl.sum((reach >= rank).to(tl.int64)) - 1
        one_bin = tl.full((), 1, tl.int64) << shift
        start = first + chosen * one_bin
        end = tl.where(chosen == BINS - 1, last, tl.minimum(start + one_bin - 1, last))
        # What is below 1 are zeros; a rank that no entry has is below them.
        below = first <= 1
        nothing = tl.where(rank <= numel, 0, -1).to(tl.int64)
        none = chosen < 0
        closed = none & (below | (rank > numel))
        tl.store(ptr, tl.where(none, tl.where(closed, nothing, 1), start))
        tl.store(ptr + 1, tl.where(none, tl.where(closed, nothing, first - 1), end))
        higher = tl.sum(tl.where(bin_ == chosen, reach - held, 0))
        tl.store(ptr + 2, tl.where(none, all_, higher))
        if none & ~closed:
            tl.store(state_ptr + MISSED, 1)
