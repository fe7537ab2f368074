"""Further passes over the candidates only, with finer bins, for what the first pass left open."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, key_words
from gradwire.kernels.cuda.threshold.bitmask import (
    REGISTERS,
    first_marked,
    load_words,
    mark_reaching,
    max_popcount,
    words_per_step,
)
from gradwire.kernels.cuda.threshold.dependent_launch import dependent_options, wait_for_previous
from gradwire.kernels.cuda.threshold.histogram import (
    BOUND_TOO_HIGH,
    FINE_BINS,
    LEVELS,
    THRESHOLD_F64,
    UNDECIDED,
    add_to_histogram,
    bin_shift,
    bounds,
    fine_bins_ptr,
    is_contended,
    is_last,
    narrow,
)
from gradwire.kernels.cuda.threshold.passes import TILE, grid_of, span
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import as_float64, solve_threshold, store_outcome
from gradwire.kernels.cuda.threshold.subsample import recount_sample


@triton.jit
def _load_interval(state_ptr, interval, undecided):
    """Returns first and last magnitude and log2 of a bin, as int32; empty if decided already."""
    first, last = bounds(state_ptr, interval)
    last = tl.where((undecided >> interval) & 1 != 0, last, first)
    return first.to(tl.int32), last.to(tl.int32), bin_shift(first, last, FINE_BINS).to(tl.int32)


@triton.jit
def _is_contended(size, here, first, last, shift):
    contended = first > last
    if first < last:
        contended = is_contended(size, here & (size >= first) & (size <= last), first, shift)
    return contended


@triton.jit
def _add(bins_ptr, size, here, first, last, shift, contended):
    if first < last:
        inside = here & (size >= first) & (size <= last)
        add_to_histogram(bins_ptr, size, inside, first, shift, contended, FINE_BINS)


@triton.jit
def _recount(
    x_ptr, state_ptr, words_ptr, level, undecided, WORDS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Counts the marked entries inside the intervals by finer bins."""
    lower_first, lower_last, lower_shift = _load_interval(state_ptr, 0, undecided)
    upper_first, upper_last, upper_shift = _load_interval(state_ptr, 1, undecided)
    limit_first, limit_last, limit_shift = _load_interval(state_ptr, 2, undecided)
    bins_ptr = fine_bins_ptr(state_ptr, level, 0)
    for begin in range(0, EACH, WORDS):
        word, bits = load_words(words_ptr, begin, EACH, WORDS)
        steps = max_popcount(bits)
        size, here = first_marked(x_ptr, word, bits)
        lower_contended = _is_contended(size, here, lower_first, lower_last, lower_shift)
        upper_contended = _is_contended(size, here, upper_first, upper_last, upper_shift)
        limit_contended = _is_contended(size, here, limit_first, limit_last, limit_shift)
        while steps > 0:
            size, here = first_marked(x_ptr, word, bits)
            _add(bins_ptr, size, here, lower_first, lower_last, lower_shift, lower_contended)
            _add(
                bins_ptr + FINE_BINS,
                size,
                here,
                upper_first,
                upper_last,
                upper_shift,
                upper_contended,
            )
            _add(
                bins_ptr + 2 * FINE_BINS,
                size,
                here,
                limit_first,
                limit_last,
                limit_shift,
                limit_contended,
            )
            bits &= bits - 1
            steps -= 1


@triton.jit(do_not_specialize=["factor", "level", "sample_size", *KEYS])
def _refine_kernel(
    x_ptr, state_ptr, sums_ptr, maxima_ptr, words_ptr, numel, factor, level, sample_size, key_low,
    key_high, KIND: tl.constexpr, SPAN: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts in finer bins, if any interval is undecided."""
    wait_for_previous(PDL)
    undecided = tl.load(state_ptr + UNDECIDED)
    if undecided != 0:
        if (level == 0) & (tl.load(state_ptr + BOUND_TOO_HIGH) != 0):
            mark_reaching(x_ptr, words_ptr, 1, numel, TILES, TILE)
        if KIND == "sampled":
            start = tl.program_id(0).to(tl.int64) * TILES * TILE
            end = tl.minimum(start + TILES * TILE, numel)
            recount_sample(
                x_ptr, state_ptr, level, start, end, numel, sample_size, key_low, key_high
            )
        if undecided & 7 != 0:
            _recount(x_ptr, state_ptr, words_ptr, level, undecided, WORDS, TILES * TILE // 32)
        if is_last(state_ptr, 1 + level):
            for interval in tl.static_range(4 if KIND == "sampled" else 3):
                first, last = bounds(state_ptr, interval)
                if (first < last) & ((undecided >> interval) & 1 != 0):
                    count = sample_size if interval == 3 else numel
                    interval_index = interval + tl.arange(0, 1)
                    bins_ptr = fine_bins_ptr(state_ptr, level, interval)
                    shift = bin_shift(first, last, FINE_BINS)
                    narrow(
                        state_ptr,
                        interval_index,
                        interval_index >= 0,
                        bins_ptr,
                        shift,
                        count,
                        FINE_BINS,
                    )
            tl.debug_barrier()
            programs = tl.num_programs(0)
            if (KIND == "excess") | (undecided == 4):
                # The threshold is known: only the rank over the limit was open.
                store_outcome(state_ptr, as_float64(tl.load(state_ptr + THRESHOLD_F64)), 0)
            else:
                solve_threshold(
                    state_ptr, sums_ptr, maxima_ptr, numel, programs, factor, level + 1, KIND,
                    ROUNDS, SPAN,
                )  # fmt: skip


def refine(
    x: Tensor, search: Search, state: Tensor, sums: Tensor, maxima: Tensor, words: Tensor
) -> None:
    """Decides the open intervals of the state; launches return at once if there are none."""
    programs, tiles = grid_of(x.numel())
    for level in range(LEVELS.value):
        _refine_kernel[(programs,)](
            x, state, sums, maxima, words, x.numel(), search.factor, level, search.sample_size,
            *key_words(search.key), KIND=search.kind, ROUNDS=search.rounds,
            SPAN=span(programs), WORDS=words_per_step(words, programs), TILES=tiles,
            TILE=TILE, maxnreg=REGISTERS, **dependent_options(x),
        )  # fmt: skip
