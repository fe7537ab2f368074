"""Order statistics by histograms: bounds on the magnitude of a rank, narrowed pass by pass.

The first pass counts the magnitudes from a sampled bound on in 2048 bins; later passes count those
inside the bounds in 4096. The last program of each launch continues with the bin that holds the
rank. All intermediate results are in one int64 tensor, the state, which the host does not read.
"""

import triton
import triton.language as tl

BINS = tl.constexpr(2048)
FINE_BINS = tl.constexpr(4096)
"""Bins of later passes: as many as there are magnitudes in a bin of the first."""
NONFINITE = tl.constexpr(32)
"""Number of entries that are not finite. Before it: the programs done, per launch."""
UNDECIDED = tl.constexpr(33)
"""Bit set of the intervals too wide to decide the threshold, or whether too many reach it."""
THRESHOLD = tl.constexpr(34)
OVER_LIMIT = tl.constexpr(35)
"""True if more entries reach the threshold than may be selected, so the largest are."""
BOUND_TOO_HIGH = tl.constexpr(36)
"""True if a rank lies below all marked entries."""
THRESHOLD_F64 = tl.constexpr(37)
"""The threshold as the bits of a float64."""
SAMPLED_BOUND = tl.constexpr(38)
"""The magnitude from which on the first pass marks entries."""
ABOVE_BINS = tl.constexpr(39)
"""Number of entries above the first bins."""
PREDICTED_BOUNDS = tl.constexpr(40)
"""Bounds of each predicted threshold (spill_buffer.py): first magnitude inside, first above."""
RESCANS = tl.constexpr(44)
"""Programs that had to read their range again, as the spill buffer did not suffice."""
INTERVALS = tl.constexpr(48)
"""Four numbers per interval: first and last magnitude, entries above it, and the rank."""
HEADER = tl.constexpr(64)

LOWER = tl.constexpr(0)
UPPER = tl.constexpr(1)
LIMIT = tl.constexpr(2)
SAMPLE = tl.constexpr(3)
"""Ranks of the intervals: fewer entries than LOWER are too few, as many as UPPER too many, LIMIT is
the first rank over the limit, and SAMPLE a rank of the subsample."""

COARSE_SHIFT = tl.constexpr(12)
"""log2 of the width of the first bins: 2048 of them span a factor of two."""
COARSE_RANGE = tl.constexpr(2048 << 12)

LEVELS = tl.constexpr(3)
"""Passes with finer bins: enough for bins of one number, however bad the sampled bound."""
SAMPLE_BINS = tl.constexpr(64 + 2048)
"""Offset of the first bins of a subsample, after those of all entries; then rows of fine bins."""
FINE_ROWS = tl.constexpr(64 + 2 * 2048)
STATE_SIZE = tl.constexpr(64 + 2 * 2048 + LEVELS.value * 4 * 4096)


@triton.jit
def is_last(state_ptr, launch):
    """Returns whether this program is the last of its launch; it sees all results of the others."""
    tl.debug_barrier()
    done = tl.atomic_add(state_ptr + launch, tl.full((), 1, tl.int64), sem="acq_rel")
    return done == tl.num_programs(0) - 1


@triton.jit
def bounds(state_ptr, interval):
    """Returns the first and last magnitude of an interval, as int64."""
    ptr = state_ptr + INTERVALS + 4 * interval
    return tl.load(ptr), tl.load(ptr + 1)


@triton.jit
def bin_shift(first, last, BINS: tl.constexpr):
    """Returns log2 of the smallest bin width for which BINS bins suffice."""
    shift = tl.full((), 0, tl.int64)
    while ((last - first) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _bin_offset(bin_, BINS: tl.constexpr):
    """Returns the offset of a bin: neighbours, which are counted together, lie far apart."""
    return (bin_ % (BINS // 16)) * 16 + bin_ // (BINS // 16)


@triton.jit
def add_to_histogram(bins_ptr, size, inside, first, shift, contended, BINS: tl.constexpr):
    """Counts the magnitudes inside by bins, of which there must be enough.

    If `contended`, the entries of the lowest bin are added at once: atomics on one word serialise.
    """
    bin_ = tl.where(inside, (size - first) >> shift, BINS)
    if contended:
        lowest = tl.min(bin_, 0)
        equal = tl.sum((bin_ == lowest).to(tl.int64))
        tl.atomic_add(
            bins_ptr + _bin_offset(lowest, BINS), equal, mask=lowest < BINS, sem="relaxed"
        )
        inside &= bin_ != lowest
    count = tl.full(bin_.shape, 1, tl.int64)
    tl.atomic_add(bins_ptr + _bin_offset(bin_, BINS), count, mask=inside, sem="relaxed")


@triton.jit
def is_contended(size, inside, first, shift):
    """Returns whether one in eight or more of all entries is inside, and in the lowest bin.

    Loops over marked entries ask it only of the first ones, since it synchronises all warps.
    """
    bin_ = tl.where(inside, (size - first) >> shift, 0x7FFFFFFF)
    equal = inside & (bin_ == tl.min(bin_, 0))
    return tl.sum(equal.to(tl.int32)) * 8 > inside.shape[0]


@triton.jit
def fine_bins_ptr(state_ptr, level, interval):
    """Returns the pointer to the fine bins of an interval."""
    return state_ptr + FINE_ROWS + (4 * level + interval) * FINE_BINS


@triton.jit
def _last_reaching(counts, above, rank):
    """Returns per row the last bin from which on `rank` are counted, or -1; and the count above."""
    reach = above[:, None] + tl.cumsum(counts, 1, reverse=True)
    enough = reach >= rank[:, None]
    behind = tl.max(tl.where(enough, above[:, None], reach), axis=1)
    return tl.sum(enough.to(tl.int32), axis=1) - 1, behind


@triton.jit
def _bin_of_rank(bins_ptr, selected, above, rank, BINS: tl.constexpr):
    """Returns the bin that holds each rank, -1 if none does, and the entries in bins above it.

    Neighbouring bins lie in 16 columns: the column is found first, so that no scan is long.
    """
    row, column = tl.arange(0, BINS // 16) * 16, tl.arange(0, 16)
    held = tl.sum(tl.load(bins_ptr + row[:, None] + column[None, :]), axis=0)
    counts = tl.where(selected[:, None], held[None, :], 0)
    column, higher = _last_reaching(counts, above, rank)
    at = bins_ptr + row[None, :] + tl.maximum(column, 0)[:, None]
    row, behind = _last_reaching(tl.load(at, mask=selected[:, None], other=0), higher, rank)
    run_search = column >= 0
    return tl.where(run_search, column * (BINS // 16) + row, -1), tl.where(
        run_search, behind, higher
    )


@triton.jit
def narrow(state_ptr, interval, selected, bins_ptr, shift, numel, BINS: tl.constexpr):
    """Narrows the selected intervals, which share these bins, to the bin that holds the rank.

    If no bin does, the interval continues above all bins, or below them.
    """
    ptr = state_ptr + INTERVALS + 4 * interval
    first, last, above, rank = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)
    selected &= first < last
    bin_of_rank, higher = _bin_of_rank(bins_ptr, selected, above, rank, BINS)
    one_bin = tl.full((), 1, tl.int64) << shift
    above_all = above >= rank
    below_all = (bin_of_rank < 0) & ~above_all
    # Zeros are below 1; a rank that no entry has is below them.
    no_entry = tl.where(rank <= numel, 0, -1).to(tl.int64)
    closed = below_all & ((first <= 1) | (rank > numel))
    start = tl.where(above_all, first + BINS * one_bin, first + bin_of_rank * one_bin)
    end = tl.where(above_all, last, tl.minimum(start + one_bin - 1, last))
    tl.store(ptr, tl.where(below_all, tl.where(closed, no_entry, 1), start), mask=selected)
    tl.store(
        ptr + 1, tl.where(below_all, tl.where(closed, no_entry, first - 1), end), mask=selected
    )
    tl.store(ptr + 2, tl.where(above_all, 0, higher), mask=selected)
    # Subsampled entries are found by index, without the bitmask.
    too_high = selected & below_all & ~closed & (interval != SAMPLE)
    tl.store(state_ptr + BOUND_TOO_HIGH, 1, mask=tl.max(too_high.to(tl.int32), 0) != 0)
