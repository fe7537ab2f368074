"""Order statistics by histograms: bounds on the magnitude of a rank, narrowed pass by pass.

The first pass counts the magnitudes from a sampled bound on in 2048 bins; later passes count those
inside the bounds in 4096. The last program of each launch continues with the bin that holds the
rank. All intermediate results are in one int64 tensor, the state, which the host does not read.
"""

import triton
import triton.language as tl

BINS = tl.constexpr(2048)
FINE = tl.constexpr(4096)
"""Bins of later passes: as many as there are magnitudes in a bin of the first."""
ODD = tl.constexpr(32)
"""Entries that are no finite number. Before them, for each launch, how many programs are done."""
OPEN = tl.constexpr(33)
"""Of which brackets the bounds are too wide to say what the border is, or whether it passes too
many: the bit of each."""
BORDER = tl.constexpr(34)
CUT = tl.constexpr(35)
"""Whether more reach the border than may be chosen, so that the largest are."""
MISSED = tl.constexpr(36)
"""Whether a rank lies below all that was marked."""
EXACT = tl.constexpr(37)
"""The border as the bits of a float64."""
GUESS = tl.constexpr(38)
"""The magnitude from which on entries were marked first."""
BEYOND = tl.constexpr(39)
"""Entries beyond the first bins."""
AHEAD = tl.constexpr(40)
"""Two numbers for each border of cuda/threshold/spill_buffer.py: first magnitude put aside, and first beyond."""
AGAIN = tl.constexpr(44)
"""Programs to which what was put aside did not tell enough."""
BRACKETS = tl.constexpr(48)
"""Four numbers each: first and last magnitude, entries above them, and the rank."""
HEAD = tl.constexpr(64)

FEW = tl.constexpr(0)
MANY = tl.constexpr(1)
MOST = tl.constexpr(2)
SAMPLE = tl.constexpr(3)
"""Of what is a bracket: fewer than its rank are too few, or as many too many; the rest by name."""

COARSE = tl.constexpr(12)
"""log2 of the first bins: 2048 of them are a factor of two."""
NEAR = tl.constexpr(2048 << 12)

LEVELS = tl.constexpr(3)
"""Passes with finer bins: enough for bins of one number whatever the guess was."""
DRAWN = tl.constexpr(64 + 2048)
"""Where the first bins of a drawn sample are, after those of all; then rows of later ones."""
ROWS = tl.constexpr(64 + 2 * 2048)
SIZE = tl.constexpr(64 + 2 * 2048 + LEVELS.value * 4 * 4096)


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
def _spot(bin_, BINS: tl.constexpr):
    """Where a bin lies: neighbours, which count most at the same time, lie far apart."""
    return (bin_ % (BINS // 16)) * 16 + bin_ // (BINS // 16)


@triton.jit
def tally(bins_ptr, size, inside, first, shift, crowd, BINS: tl.constexpr):
    """Counts the magnitudes inside by bins, of which there must be enough.

    With `crowd`, those of the lowest bin are added all at once: atomics on one word wait in line.
    """
    bin_ = tl.where(inside, (size - first) >> shift, BINS)
    if crowd:
        lowest = tl.min(bin_, 0)
        equal = tl.sum((bin_ == lowest).to(tl.int64))
        tl.atomic_add(bins_ptr + _spot(lowest, BINS), equal, mask=lowest < BINS, sem="relaxed")
        inside &= bin_ != lowest
    count = tl.full(bin_.shape, 1, tl.int64)
    tl.atomic_add(bins_ptr + _spot(bin_, BINS), count, mask=inside, sem="relaxed")


@triton.jit
def is_crowd(size, inside, first, shift):
    """Whether at least one in eight of all that might be inside is, in the lowest bin.

    A walk asks this of the first marked entries only: asking makes all warps wait for each other.
    """
    bin_ = tl.where(inside, (size - first) >> shift, 0x7FFFFFFF)
    equal = inside & (bin_ == tl.min(bin_, 0))
    return tl.sum(equal.to(tl.int32)) * 8 > inside.shape[0]


@triton.jit
def fine_row(state_ptr, level, bracket):
    """Where the bins of a later pass are."""
    return state_ptr + ROWS + (4 * level + bracket) * FINE


@triton.jit
def _last_reaching(held, above, rank):
    """Of each row the last place from which on `rank` are held, or -1; and how many are behind."""
    reach = above[:, None] + tl.cumsum(held, 1, reverse=True)
    enough = reach >= rank[:, None]
    behind = tl.max(tl.where(enough, above[:, None], reach), axis=1)
    return tl.sum(enough.to(tl.int32), axis=1) - 1, behind


@triton.jit
def _holder(bins_ptr, asked, above, rank, BINS: tl.constexpr):
    """The bin that holds each rank, -1 if none does, and how many are in those above it.

    Bins lie in 16 columns of neighbours: first the column is found, so that no scan is long.
    """
    row, column = tl.arange(0, BINS // 16) * 16, tl.arange(0, 16)
    held = tl.sum(tl.load(bins_ptr + row[:, None] + column[None, :]), axis=0)
    each = tl.where(asked[:, None], held[None, :], 0)
    column, higher = _last_reaching(each, above, rank)
    at = bins_ptr + row[None, :] + tl.maximum(column, 0)[:, None]
    row, behind = _last_reaching(tl.load(at, mask=asked[:, None], other=0), higher, rank)
    found = column >= 0
    return tl.where(found, column * (BINS // 16) + row, -1), tl.where(found, behind, higher)


@triton.jit
def narrow(state_ptr, bracket, asked, bins_ptr, shift, numel, BINS: tl.constexpr):
    """Goes on with the bin that holds the rank: above all bins, or below them, if none does.

    For the brackets that are asked for, with the bins that they share.
    """
    ptr = state_ptr + BRACKETS + 4 * bracket
    first, last, above, rank = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)
    asked &= first < last
    chosen, higher = _holder(bins_ptr, asked, above, rank, BINS)
    one_bin = tl.full((), 1, tl.int64) << shift
    over = above >= rank
    none = (chosen < 0) & ~over
    # What is below 1 are zeros; a rank that no entry has is below them.
    nothing = tl.where(rank <= numel, 0, -1).to(tl.int64)
    closed = none & ((first <= 1) | (rank > numel))
    start = tl.where(over, first + BINS * one_bin, first + chosen * one_bin)
    end = tl.where(over, last, tl.minimum(start + one_bin - 1, last))
    tl.store(ptr, tl.where(none, tl.where(closed, nothing, 1), start), mask=asked)
    tl.store(ptr + 1, tl.where(none, tl.where(closed, nothing, first - 1), end), mask=asked)
    tl.store(ptr + 2, tl.where(over, 0, higher), mask=asked)
    # The drawn are found again by their positions, without marks.
    missed = asked & none & ~closed & (bracket != SAMPLE)
    tl.store(state_ptr + MISSED, 1, mask=tl.max(missed.to(tl.int32), 0) != 0)
