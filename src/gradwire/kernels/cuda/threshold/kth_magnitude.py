"""Magnitude of the k-th largest entry: exact, without sorting, without the host.

A sample bounds it from both sides, and the pass that adds the residual counts what reaches the two
bounds. A second pass marks what reaches the lower one, and counts what lies between in 2048 bins;
the bin that holds the k-th is divided into 2048 smaller ones among the marked entries, until a bin
is one number. A bound that misses only makes the first bins wider.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import trailing_zeros
from gradwire.kernels.cuda.threshold.bitmask import WORDS, load_words, new_bitmask, store_bitmask
from gradwire.kernels.cuda.threshold.passes import TILE, count_reaching, grid_of, magnitude
from gradwire.types import EFInput

SAMPLE_SIZE = 4096
ZERO_BITS = 15
"""Zero bits of a bound: it is precise to a 256th, and found in fewer steps."""


@triton.jit
def _store_bounds(size, out_ptr, lower_rank, upper_rank, ZERO_BITS: tl.constexpr):
    """Stores bounds: out[0] is reached by `lower_rank` sizes, out[1] by fewer than `upper_rank`.

    Both are multiples of 2^ZERO_BITS, as high and as low as possible.
    """
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32)
    for step in range(31 - ZERO_BITS):
        bit = tl.full((), 1, tl.int32) << (30 - step)
        # Both counts in one sum: neither needs more than 15 bits.
        reached = (size >= low + bit).to(tl.int32) + ((size >= high + bit).to(tl.int32) << 16)
        counts = tl.sum(reached)
        low = tl.where((counts & 0xFFFF) >= lower_rank, low + bit, low)
        high = tl.where((counts >> 16) >= upper_rank, high + bit, high)
    tl.store(out_ptr, low)
    # 2^31 would be negative.
    above = tl.minimum(high.to(tl.int64) + (1 << ZERO_BITS), 0x7FFFFFFF).to(tl.int32)
    tl.store(out_ptr + 1, above)


@triton.jit(do_not_specialize=["stride", "count", "lower_rank", "upper_rank"])
def _sample_bounds_kernel(
    x_ptr, residual_ptr, out_ptr, decay, stride, count, lower_rank, upper_rank,
    FEEDBACK: tl.constexpr, ZERO_BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Computes two bounds around a rank from a sample at equal distances."""
    i = tl.arange(0, SPAN)
    index = i.to(tl.int64) * stride
    total = tl.load(x_ptr + index, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + index, mask=i < count, other=0.0)
    _store_bounds(
        tl.where(i < count, magnitude(total), -1), out_ptr, lower_rank, upper_rank, ZERO_BITS
    )


def sample_bounds(ef: EFInput, count: int) -> Tensor:
    """Returns two magnitudes (bits) that the count-th largest should be between."""
    x, residual, residual_out, decay = ef
    feedback = residual is not None and residual_out is not None
    sample_size = min(x.numel(), SAMPLE_SIZE)
    expected = count * sample_size / x.numel()
    margin = 0.05 * expected + 4 * math.sqrt(expected)
    lower_rank, upper_rank = (
        min(sample_size, math.ceil(expected + margin) + 1),
        max(1, math.floor(expected - margin)),
    )
    # Odd, so that the sample does not follow a column of a matrix.
    stride = (x.numel() // sample_size - 1) | 1
    out = torch.empty(2, dtype=torch.int32, device=x.device)
    _sample_bounds_kernel[(1,)](
        x, x if residual is None else residual, out, decay, stride, sample_size, lower_rank,
        upper_rank, FEEDBACK=feedback, ZERO_BITS=ZERO_BITS, SPAN=SAMPLE_SIZE, num_warps=16,
    )  # fmt: skip
    return out


BINS = 2048
LEVELS = 3
"""Bins of 2^20, 2^9 and 1 in the 31 bits of a magnitude, if the bounds do not help."""

DENSE = 64
"""If more than one in so many entries is inside, those of a bin are added up before the atomic."""


@triton.jit(do_not_specialize=["count", "numel"])
def _init_interval_kernel(bounds_ptr, counts_ptr, state_ptr, count, numel, BINS: tl.constexpr):
    """Stores the interval of the threshold.

    state = first magnitude, log2 of a bin, entries above, last magnitude, entries inside.
    """
    low, high = tl.load(bounds_ptr).to(tl.int64), tl.load(bounds_ptr + 1).to(tl.int64)
    reach_low, reach_high = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    too_high = reach_low < count
    too_low = reach_high >= count
    first = tl.where(too_low, high, tl.where(too_high, 0, low))
    last = tl.where(too_low, 0x7FFFFFFF, tl.where(too_high, low, high) - 1)
    above = tl.where(too_low, 0, tl.where(too_high, reach_low, reach_high))
    shift = tl.full((), 0, tl.int64)
    while ((last - first) >> shift) >= BINS:
        shift += 1
    tl.store(state_ptr, first)
    tl.store(state_ptr + 1, shift)
    tl.store(state_ptr + 2, above)
    tl.store(state_ptr + 3, last)
    tl.store(
        state_ptr + 4, tl.where(too_low, reach_high, tl.where(too_high, numel, reach_low)) - above
    )


@triton.jit
def _load_interval(state_ptr, numel, DENSE: tl.constexpr):
    """Returns first and last magnitude, log2 of a bin, and whether many entries are inside."""
    first, last = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 3).to(tl.int32)
    return first, last, tl.load(state_ptr + 1).to(tl.int32), tl.load(state_ptr + 4) * DENSE > numel


@triton.jit
def _add_to_histogram(bins_ptr, size, here, first, last, shift, dense, BINS: tl.constexpr):
    """Counts those of the magnitudes `here` that lie in the interval, by bins."""
    inside = here & (size >= first) & (size <= last)
    bin_ = tl.where(inside, (size - first) >> shift, BINS)
    if dense:
        # Often most of them are equal: those of the first bin are added at once.
        lowest = tl.min(bin_, 0)
        equal = tl.sum((bin_ == lowest).to(tl.int64))
        tl.atomic_add(bins_ptr + lowest, equal, mask=lowest < BINS, sem="relaxed")
        inside &= bin_ != lowest
    tl.atomic_add(bins_ptr + bin_, tl.full(bin_.shape, 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _histogram_kernel(
    x_ptr, state_ptr, words_ptr, bins_ptr, numel, DENSE: tl.constexpr, BINS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts by bins, and marks the entries from the interval on, a superset of the selected."""
    first, last, shift, dense = _load_interval(state_ptr, numel, DENSE)
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    for tile in range(TILES):
        index = start + tile * TILE + tl.arange(0, TILE)
        size = magnitude(tl.load(x_ptr + index, mask=index < numel, other=0.0))
        store_bitmask(words_ptr, start + tile * TILE, (index < numel) & (size >= first), TILE)
        _add_to_histogram(bins_ptr, size, index < numel, first, last, shift, dense, BINS)


@triton.jit(do_not_specialize=["numel"])
def _refine_kernel(
    x_ptr, state_ptr, words_ptr, bins_ptr, numel, DENSE: tl.constexpr, BINS: tl.constexpr,
    EACH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Counts the marked entries in smaller bins."""
    first, last, shift, dense = _load_interval(state_ptr, numel, DENSE)
    # Negative if a bin is one number already.
    if shift >= 0:
        for begin in range(0, EACH, WORDS):
            word, bits = load_words(words_ptr, begin, EACH, WORDS)
            while tl.max((bits != 0).to(tl.int32), 0) > 0:
                index = word * 32 + trailing_zeros(bits).to(tl.int64)
                size = magnitude(tl.load(x_ptr + index, mask=bits != 0, other=0.0))
                _add_to_histogram(bins_ptr, size, bits != 0, first, last, shift, dense, BINS)
                bits &= bits - 1


@triton.jit(do_not_specialize=["count"])
def _narrow_kernel(bins_ptr, state_ptr, count, BINS: tl.constexpr, STEP: tl.constexpr):
    """Narrows the interval to the bin that holds the threshold; stops at bins of one number."""
    shift = tl.load(state_ptr + 1)
    if shift >= 0:
        bin_ = tl.arange(0, BINS)
        counts = tl.load(bins_ptr + bin_)
        reach = tl.load(state_ptr + 2) + tl.sum(counts) - tl.cumsum(counts, 0) + counts
        bin_of_rank = tl.sum((reach >= count).to(tl.int32)) - 1
        above = tl.sum(tl.where(bin_ == bin_of_rank, reach - counts, 0))
        tl.store(state_ptr + 4, tl.sum(tl.where(bin_ == bin_of_rank, counts, 0)))
        first = tl.load(state_ptr) + (bin_of_rank.to(tl.int64) << shift)
        last = first + (tl.full((), 1, tl.int64) << shift) - 1
        tl.store(state_ptr, first)
        tl.store(state_ptr + 3, tl.minimum(tl.load(state_ptr + 3), last))
        tl.store(state_ptr + 1, tl.where(shift == 0, -1, tl.maximum(shift - STEP, 0)))
        tl.store(state_ptr + 2, above)


def kth_largest(ef: EFInput, count: int) -> tuple[Tensor, Tensor]:
    """Returns the bits of the count-th largest magnitude, and a bitmask of at least all selected.

    The first is [threshold, -1, entries above it, threshold, entries equal to it] in int64.
    `ef.residual_out` then holds the sum. 0 < count <= numel.
    """
    numel = ef.grad.numel()
    bounds = sample_bounds(ef, count)
    # The counts of two bounds, the state, and the bins of all levels in one buffer.
    buffer = torch.zeros(2 + 6 + LEVELS * BINS, dtype=torch.int64, device=ef.grad.device)
    counts, state, bins = buffer[:2], buffer[2:8], buffer[8:].view(LEVELS, BINS)
    count_reaching(ef, bounds, counts, False)
    _init_interval_kernel[(1,)](bounds, counts, state, count, numel, BINS=BINS, num_warps=1)
    total = ef.grad if ef.residual_out is None else ef.residual_out
    programs, tiles = grid_of(numel)
    words = new_bitmask(total)
    for number, level in enumerate(bins):
        if number == 0:
            _histogram_kernel[(programs,)](
                total, state, words, level, numel, DENSE=DENSE, BINS=BINS, TILES=tiles, TILE=TILE,
                num_warps=8,
            )  # fmt: skip
        else:
            _refine_kernel[(programs,)](
                total, state, words, level, numel, DENSE=DENSE, BINS=BINS, EACH=tiles * TILE // 32,
                WORDS=WORDS,
            )  # fmt: skip
        _narrow_kernel[(1,)](level, state, count, BINS=BINS, STEP=BINS.bit_length() - 1)
    return state, words
