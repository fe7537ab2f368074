"""Further passes over the candidates only, with finer bins, for what the first pass left open."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, halves
from gradwire.kernels.cuda.threshold.bitmask import (
    REGISTERS,
    first_marked,
    mark_from,
    marks,
    most_marks,
    together,
)
from gradwire.kernels.cuda.threshold.dependent_launch import follows, in_turn
from gradwire.kernels.cuda.threshold.histogram import (
    EXACT,
    FINE,
    LEVELS,
    MISSED,
    OPEN,
    bounds,
    fine_row,
    is_crowd,
    is_last,
    narrow,
    tally,
    width,
)
from gradwire.kernels.cuda.threshold.passes import TILE, span, spread
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import decide, double, settle
from gradwire.kernels.cuda.threshold.subsample import recount_drawn


@triton.jit
def _bracket(state_ptr, bracket, asked):
    """First and last magnitude and log2 of a bin, as int32; an empty one if none is asked for."""
    first, last = bounds(state_ptr, bracket)
    last = tl.where((asked >> bracket) & 1 != 0, last, first)
    return first.to(tl.int32), last.to(tl.int32), width(first, last, FINE).to(tl.int32)


@triton.jit
def _crowd(size, here, first, last, shift):
    crowd = first > last
    if first < last:
        crowd = is_crowd(size, here & (size >= first) & (size <= last), first, shift)
    return crowd


@triton.jit
def _count(bins_ptr, size, here, first, last, shift, crowd):
    if first < last:
        inside = here & (size >= first) & (size <= last)
        tally(bins_ptr, size, inside, first, shift, crowd, FINE)


@triton.jit
def _recount(
    x_ptr, state_ptr, words_ptr, level, asked, WORDS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Counts the marked inside the bounds by finer bins."""
    few_first, few_last, few_shift = _bracket(state_ptr, 0, asked)
    many_first, many_last, many_shift = _bracket(state_ptr, 1, asked)
    most_first, most_last, most_shift = _bracket(state_ptr, 2, asked)
    bins_ptr = fine_row(state_ptr, level, 0)
    for begin in range(0, EACH, WORDS):
        word, held = marks(words_ptr, begin, EACH, WORDS)
        turns = most_marks(held)
        size, here = first_marked(x_ptr, word, held)
        few_crowd = _crowd(size, here, few_first, few_last, few_shift)
        many_crowd = _crowd(size, here, many_first, many_last, many_shift)
        most_crowd = _crowd(size, here, most_first, most_last, most_shift)
        while turns > 0:
            size, here = first_marked(x_ptr, word, held)
            _count(bins_ptr, size, here, few_first, few_last, few_shift, few_crowd)
            _count(bins_ptr + FINE, size, here, many_first, many_last, many_shift, many_crowd)
            _count(bins_ptr + 2 * FINE, size, here, most_first, most_last, most_shift, most_crowd)
            held &= held - 1
            turns -= 1


@triton.jit(do_not_specialize=["factor", "level", "tried", *KEYS])
def _refine_kernel(
    x_ptr, state_ptr, sums_ptr, tops_ptr, words_ptr, numel, factor, level, tried, key_low, key_high,
    KIND: tl.constexpr, SPAN: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Counts in finer bins, where that is needed."""
    in_turn(EARLY)
    asked = tl.load(state_ptr + OPEN)
    if asked != 0:
        if (level == 0) & (tl.load(state_ptr + MISSED) != 0):
            mark_from(x_ptr, words_ptr, 1, numel, TILES, TILE)
        if KIND == "sampled":
            start = tl.program_id(0).to(tl.int64) * TILES * TILE
            end = tl.minimum(start + TILES * TILE, numel)
            recount_drawn(x_ptr, state_ptr, level, start, end, numel, tried, key_low, key_high)
        if asked & 7 != 0:
            _recount(x_ptr, state_ptr, words_ptr, level, asked, WORDS, TILES * TILE // 32)
        if is_last(state_ptr, 1 + level):
            for bracket in tl.static_range(4 if KIND == "sampled" else 3):
                first, last = bounds(state_ptr, bracket)
                if (first < last) & ((asked >> bracket) & 1 != 0):
                    many = tried if bracket == 3 else numel
                    one = bracket + tl.arange(0, 1)
                    bins_ptr = fine_row(state_ptr, level, bracket)
                    shift = width(first, last, FINE)
                    narrow(state_ptr, one, one >= 0, bins_ptr, shift, many, FINE)
            tl.debug_barrier()
            programs = tl.num_programs(0)
            if (KIND == "excess") | (asked == 4):
                # The border is known: only what may not be chosen was open.
                settle(state_ptr, double(tl.load(state_ptr + EXACT)), 0)
            else:
                decide(
                    state_ptr, sums_ptr, tops_ptr, numel, programs, factor, level + 1, KIND, ROUNDS,
                    SPAN,
                )  # fmt: skip


def refine(
    x: Tensor, search: Search, state: Tensor, sums: Tensor, tops: Tensor, words: Tensor
) -> None:
    """Closes what is open in the state; each launch returns at once where nothing is."""
    programs, tiles = spread(x.numel())
    for level in range(LEVELS.value):
        _refine_kernel[(programs,)](
            x, state, sums, tops, words, x.numel(), search.factor, level, search.tried,
            *halves(search.key), KIND=search.kind, ROUNDS=search.rounds,
            SPAN=span(programs), WORDS=together(words, programs), TILES=tiles,
            TILE=TILE, maxnreg=REGISTERS, **follows(x),
        )  # fmt: skip
