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

from gradwire.kernels.cuda.packing import lowest_bit
from gradwire.kernels.cuda.threshold.bitmask import WORDS, marks, new_marks, store_marks
from gradwire.kernels.cuda.threshold.passes import TILE, magnitude, probe, spread
from gradwire.types import EFInput

GUESS = 4096
COARSE = 15
"""A guess has this many zero bits: it is within a 256th, and found in fewer steps."""


@triton.jit
def _store_ranks(size, out_ptr, lower, upper, LOWEST: tl.constexpr):
    """out[0]: what `lower` of the sizes reach; out[1]: what fewer than `upper` do.

    Both are multiples of 2^LOWEST, as high and as low as possible.
    """
    one = tl.full((), 0, tl.int32)
    two = tl.full((), 0, tl.int32)
    for step in range(31 - LOWEST):
        bit = tl.full((), 1, tl.int32) << (30 - step)
        # Both counts in one sum: neither needs more than 15 bits.
        reach = (size >= one + bit).to(tl.int32) + ((size >= two + bit).to(tl.int32) << 16)
        both = tl.sum(reach)
        one = tl.where((both & 0xFFFF) >= lower, one + bit, one)
        two = tl.where((both >> 16) >= upper, two + bit, two)
    tl.store(out_ptr, one)
    # 2^31 would be negative.
    above = tl.minimum(two.to(tl.int64) + (1 << LOWEST), 0x7FFFFFFF).to(tl.int32)
    tl.store(out_ptr + 1, above)


@triton.jit(do_not_specialize=["stride", "count", "lower", "upper"])
def _guess_kernel(
    x_ptr, residual_ptr, out_ptr, decay, stride, count, lower, upper, FEEDBACK: tl.constexpr,
    LOWEST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Two borders around a rank, by a sample at equal distances."""
    i = tl.arange(0, SPAN)
    place = i.to(tl.int64) * stride
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    _store_ranks(tl.where(i < count, magnitude(total), -1), out_ptr, lower, upper, LOWEST)


def guessed(given: EFInput, count: int) -> Tensor:
    """Two magnitudes (bits) that the count-th largest should be between."""
    x, residual, residual_out, decay = given
    feedback = residual is not None and residual_out is not None
    tried = min(x.numel(), GUESS)
    aim = count * tried / x.numel()
    room = 0.05 * aim + 4 * math.sqrt(aim)
    lower, upper = min(tried, math.ceil(aim + room) + 1), max(1, math.floor(aim - room))
    # Odd, so that the sample does not walk along a column of a matrix.
    stride = (x.numel() // tried - 1) | 1
    out = torch.empty(2, dtype=torch.int32, device=x.device)
    _guess_kernel[(1,)](
        x, x if residual is None else residual, out, decay, stride, tried, lower, upper,
        FEEDBACK=feedback, LOWEST=COARSE, SPAN=GUESS, num_warps=16,
    )  # fmt: skip
    return out


BINS = 2048
LEVELS = 3
"""Bins of 2^20, 2^9 and 1 in the 31 bits of a magnitude, if no guess helps."""

FEW = 64
"""Where more than one in so many is inside, those of a bin are added up before they are counted."""


@triton.jit(do_not_specialize=["count", "numel"])
def _bracket_kernel(borders_ptr, counts_ptr, state_ptr, count, numel, BINS: tl.constexpr):
    """Where the border lies.

    state = first magnitude, log2 of a bin, entries above, last magnitude, entries inside.
    """
    low, high = tl.load(borders_ptr).to(tl.int64), tl.load(borders_ptr + 1).to(tl.int64)
    reach_low, reach_high = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    below = reach_low < count
    beyond = reach_high >= count
    first = tl.where(beyond, high, tl.where(below, 0, low))
    last = tl.where(beyond, 0x7FFFFFFF, tl.where(below, low, high) - 1)
    above = tl.where(beyond, 0, tl.where(below, reach_low, reach_high))
    shift = tl.full((), 0, tl.int64)
    while ((last - first) >> shift) >= BINS:
        shift += 1
    tl.store(state_ptr, first)
    tl.store(state_ptr + 1, shift)
    tl.store(state_ptr + 2, above)
    tl.store(state_ptr + 3, last)
    tl.store(state_ptr + 4, tl.where(beyond, reach_high, tl.where(below, numel, reach_low)) - above)


@triton.jit
def _bracket(state_ptr, numel, FEW: tl.constexpr):
    """First and last magnitude, log2 of a bin, and whether many entries are inside."""
    first, last = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 3).to(tl.int32)
    return first, last, tl.load(state_ptr + 1).to(tl.int32), tl.load(state_ptr + 4) * FEW > numel


@triton.jit
def _tally(bins_ptr, size, here, first, last, shift, many, BINS: tl.constexpr):
    """Counts those of the magnitudes here that lie in the bracket, by bins."""
    inside = here & (size >= first) & (size <= last)
    bin_ = tl.where(inside, (size - first) >> shift, BINS)
    if many:
        # Often most of them are equal: those of the first bin are added all at once.
        lowest = tl.min(bin_, 0)
        equal = tl.sum((bin_ == lowest).to(tl.int64))
        tl.atomic_add(bins_ptr + lowest, equal, mask=lowest < BINS, sem="relaxed")
        inside &= bin_ != lowest
    tl.atomic_add(bins_ptr + bin_, tl.full(bin_.shape, 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _histogram_kernel(
    x_ptr, state_ptr, words_ptr, bins_ptr, numel, FEW: tl.constexpr, BINS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Marks what reaches the bracket, among which are all that will be chosen."""
    first, last, shift, many = _bracket(state_ptr, numel, FEW)
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    for tile in range(TILES):
        place = start + tile * TILE + tl.arange(0, TILE)
        size = magnitude(tl.load(x_ptr + place, mask=place < numel, other=0.0))
        store_marks(words_ptr, start + tile * TILE, (place < numel) & (size >= first), TILE)
        _tally(bins_ptr, size, place < numel, first, last, shift, many, BINS)


@triton.jit(do_not_specialize=["numel"])
def _refine_kernel(
    x_ptr, state_ptr, words_ptr, bins_ptr, numel, FEW: tl.constexpr, BINS: tl.constexpr,
    EACH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The same in smaller bins: only the marked are looked at."""
    first, last, shift, many = _bracket(state_ptr, numel, FEW)
    # Below zero when a bin is one number already.
    if shift >= 0:
        for begin in range(0, EACH, WORDS):
            word, held = marks(words_ptr, begin, EACH, WORDS)
            while tl.max((held != 0).to(tl.int32), 0) > 0:
                place = word * 32 + lowest_bit(held).to(tl.int64)
                size = magnitude(tl.load(x_ptr + place, mask=held != 0, other=0.0))
                _tally(bins_ptr, size, held != 0, first, last, shift, many, BINS)
                held &= held - 1


@triton.jit(do_not_specialize=["count"])
def _narrow_kernel(bins_ptr, state_ptr, count, BINS: tl.constexpr, STEP: tl.constexpr):
    """Goes on with the bin that holds the border, in smaller bins; in none if they are of one."""
    shift = tl.load(state_ptr + 1)
    if shift >= 0:
        bin_ = tl.arange(0, BINS)
        held = tl.load(bins_ptr + bin_)
        reach = tl.load(state_ptr + 2) + tl.sum(held) - tl.cumsum(held, 0) + held
        chosen = tl.sum((reach >= count).to(tl.int32)) - 1
        above = tl.sum(tl.where(bin_ == chosen, reach - held, 0))
        tl.store(state_ptr + 4, tl.sum(tl.where(bin_ == chosen, held, 0)))
        first = tl.load(state_ptr) + (chosen.to(tl.int64) << shift)
        last = first + (tl.full((), 1, tl.int64) << shift) - 1
        tl.store(state_ptr, first)
        tl.store(state_ptr + 3, tl.minimum(tl.load(state_ptr + 3), last))
        tl.store(state_ptr + 1, tl.where(shift == 0, -1, tl.maximum(shift - STEP, 0)))
        tl.store(state_ptr + 2, above)


def nth_largest(given: EFInput, count: int) -> tuple[Tensor, Tensor]:
    """The bits of the count-th largest magnitude, and marks on all that reach it, and some more.

    The first is [border, -1, entries above it, border, entries on it] in int64. `given.residual_out` then
    holds the sum. 0 < count <= numel.
    """
    numel = given.grad.numel()
    guess = guessed(given, count)
    # The counts of two borders, the state, and the bins of all levels in one.
    memory = torch.zeros(2 + 6 + LEVELS * BINS, dtype=torch.int64, device=given.grad.device)
    counts, state, bins = memory[:2], memory[2:8], memory[8:].view(LEVELS, BINS)
    probe(given, guess, counts, False)
    _bracket_kernel[(1,)](guess, counts, state, count, numel, BINS=BINS, num_warps=1)
    total = given.grad if given.residual_out is None else given.residual_out
    programs, tiles = spread(numel)
    words = new_marks(total)
    for number, level in enumerate(bins):
        if number == 0:
            _histogram_kernel[(programs,)](
                total, state, words, level, numel, FEW=FEW, BINS=BINS, TILES=tiles, TILE=TILE,
                num_warps=8,
            )  # fmt: skip
        else:
            _refine_kernel[(programs,)](
                total, state, words, level, numel, FEW=FEW, BINS=BINS, EACH=tiles * TILE // 32,
                WORDS=WORDS,
            )  # fmt: skip
        _narrow_kernel[(1,)](level, state, count, BINS=BINS, STEP=BINS.bit_length() - 1)
    return state, words
