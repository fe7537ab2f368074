"""First pass: adds the residual, marks candidates, and takes the statistics for the threshold.

A sample gives a bound that slightly more entries reach than may be selected. The pass marks those
in a bitmask, counts them by bins and takes sums; what remains open is counted again among the
candidates, in finer bins. If the bound was too high, the next pass marks all entries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, key_words
from gradwire.kernels.cuda.threshold.bitmask import (
    first_marked,
    load_words,
    max_popcount,
    new_bitmask,
    store_bitmask,
)
from gradwire.kernels.cuda.threshold.dependent_launch import (
    dependent_options,
    first_options,
    wait_for_previous,
)
from gradwire.kernels.cuda.threshold.histogram import (
    ABOVE_BINS,
    BINS,
    COARSE_RANGE,
    COARSE_SHIFT,
    FINE_ROWS,
    HEADER,
    INTERVALS,
    NONFINITE,
    SAMPLE,
    SAMPLE_BINS,
    SAMPLED_BOUND,
    STATE_SIZE,
    add_to_histogram,
    is_contended,
    is_last,
    narrow,
)
from gradwire.kernels.cuda.threshold.multistage import fit_stages
from gradwire.kernels.cuda.threshold.passes import (
    TILE,
    clear,
    finite_or_zero,
    grid_of,
    kernel_inputs,
    load_total,
    magnitude,
    span,
    thread_max,
    thread_sums,
    to_float64,
)
from gradwire.kernels.cuda.threshold.refine import refine
from gradwire.kernels.cuda.threshold.sampled_bounds import Search, uses_sample
from gradwire.kernels.cuda.threshold.solve import solve_threshold
from gradwire.kernels.cuda.threshold.spill_buffer import (
    empty_spill,
    new_spill_buffer,
    spill_tile,
    store_spill,
)
from gradwire.kernels.cuda.threshold.subsample import count_sample
from gradwire.types import EFInput

HEIGHT = 4
RUN = 4
"""Tiles that are marked before the marked entries are counted."""
REGISTERS: int | None = 80
"""Registers per thread: only the last program needs more, and fewer let more programs run."""


class FirstPassResult(NamedTuple):
    state: Tensor
    words: Tensor
    """Bitmask of at least all selected; for "excess" only if the sampled bound was low enough."""
    sums: Tensor
    maxima: Tensor
    """Sums and largest magnitude of each program."""


@triton.jit
def _narrow_first(state_ptr, numel, sample_size, KIND: tl.constexpr):
    """Narrows the intervals by the bins that the first pass has counted."""
    # Thresholds depend on finite entries; all others rank above them.
    nonfinite, above = tl.load(state_ptr + NONFINITE), tl.load(state_ptr + ABOVE_BINS)
    for interval in tl.static_range(3):
        ptr = state_ptr + INTERVALS + 4 * interval
        tl.store(ptr + 2, above)
        if interval < 2:
            tl.store(ptr + 3, tl.load(ptr + 3) + nonfinite)
    tl.debug_barrier()
    interval = tl.arange(0, 4)
    narrow(state_ptr, interval, interval != SAMPLE, state_ptr + HEADER, COARSE_SHIFT, numel, BINS)
    if KIND == "sampled":
        narrow(
            state_ptr, interval, interval == SAMPLE, state_ptr + SAMPLE_BINS, COARSE_SHIFT,
            sample_size, BINS,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _count_marked(state_ptr, size, here, bound, contended):
    """Counts magnitudes from the bound on by the first bins; returns those outside the bins.

    That is 1 for each that is not finite, and 2^16 for each above the bins.
    """
    near = here & (size - bound < COARSE_RANGE)
    add_to_histogram(state_ptr + HEADER, size, near, bound, COARSE_SHIFT, contended, BINS)
    nonfinite = here & (size >= 0x7F800000)
    return nonfinite.to(tl.int32) + ((here & ~near).to(tl.int32) << 16)


@triton.jit
def _add_outside(state_ptr, outside):
    nonfinite, above_bins = (
        tl.sum((outside & 0xFFFF).to(tl.int64)),
        tl.sum((outside >> 16).to(tl.int64)),
    )
    tl.atomic_add(state_ptr + NONFINITE, nonfinite, mask=nonfinite > 0, sem="relaxed")
    tl.atomic_add(state_ptr + ABOVE_BINS, above_bins, mask=above_bins > 0, sem="relaxed")


@triton.jit
def _count_tiles(
    x_ptr, state_ptr, words_ptr, bound, begin, outside, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Counts the entries that were marked just now, and are still in the cache."""
    # Other threads have written the words.
    tl.debug_barrier()
    word, bits = load_words(words_ptr, begin, EACH, WORDS)
    steps = max_popcount(bits)
    size, here = first_marked(x_ptr, word, bits)
    contended = is_contended(size, here & (size - bound < COARSE_RANGE), bound, COARSE_SHIFT)
    while steps > 0:
        size, here = first_marked(x_ptr, word, bits)
        outside += _count_marked(state_ptr, size, here, bound, contended)
        bits &= bits - 1
        steps -= 1
    return outside


@triton.jit(do_not_specialize=["packed_words", "factor", "sample_size", *KEYS])
def _first_pass_kernel(
    x_ptr, residual_ptr, residual_out_ptr, state_ptr, sums_ptr, maxima_ptr, words_ptr, values_ptr,
    used_ptr, above_ptr, packed_ptr, decay, numel, packed_words, factor, sample_size, key_low,
    key_high, FEEDBACK: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr, ROUNDS: tl.constexpr,
    HEIGHT: tl.constexpr, CAPACITY: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    clear(packed_ptr, packed_words, TILE)
    clear(state_ptr + FINE_ROWS, STATE_SIZE - FINE_ROWS, TILE)
    bound = tl.load(state_ptr + SAMPLED_BOUND).to(tl.int32)
    total_ptr = residual_out_ptr if FEEDBACK else x_ptr
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    THREADS: tl.constexpr = TILE // HEIGHT // 4
    sums = tl.zeros((THREADS,), tl.float64)
    squares = tl.zeros((THREADS,), tl.float64)
    largest = tl.zeros((THREADS,), tl.int32)
    outside = tl.zeros((RUN * TILE // 32,), tl.int32)
    spill, predicted = empty_spill(state_ptr)
    for first in range(0, TILES, RUN):
        for tile in range(first, min(first + RUN, TILES)):
            index = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
            total = load_total(
                x_ptr, residual_ptr, residual_out_ptr, decay, index, index < numel, FEEDBACK
            )
            size = magnitude(total)
            finite_size = finite_or_zero(size)
            largest = tl.maximum(largest, thread_max(finite_size))
            if KIND == "normal":
                wide = tl.where(size < 0x7F800000, total, 0.0).to(tl.float64)
                sums += thread_sums(wide)
                squares += thread_sums(wide * wide)
            elif KIND != "sampled":
                sums += thread_sums(to_float64(finite_size))
            spill = spill_tile(values_ptr, finite_size, spill, predicted, CAPACITY)
            # Entries outside the tensor are zero, and the bound is not.
            marked = tl.reshape(size, (TILE,)) >= bound
            store_bitmask(words_ptr, start + tile * TILE, marked, TILE)
            if TILES == 1 and KIND != "excess":
                # There is only one tile, so count at once.
                flat = tl.reshape(size, (TILE,))
                contended = tl.sum(marked.to(tl.int32)) * 8 > TILE
                _add_outside(state_ptr, _count_marked(state_ptr, flat, marked, bound, contended))
        if TILES > 1 and KIND != "excess":
            outside = _count_tiles(
                total_ptr, state_ptr, words_ptr, bound, first * (TILE // 32), outside,
                TILES * TILE // 32, RUN * TILE // 32,
            )  # fmt: skip
    if TILES > 1 and KIND != "excess":
        _add_outside(state_ptr, outside)
    if KIND == "sampled":
        tl.debug_barrier()
        end = tl.minimum(start + TILES * TILE, numel)
        count_sample(total_ptr, state_ptr, start, end, numel, sample_size, key_low, key_high)
    else:
        tl.store(sums_ptr + program, tl.sum(sums))
    if KIND == "normal":
        tl.store(sums_ptr + programs + program, tl.sum(squares))
    store_spill(above_ptr, used_ptr, spill, CAPACITY)
    tl.store(maxima_ptr + program, tl.max(largest, 0))
    if is_last(state_ptr, 0):
        if KIND != "excess":
            _narrow_first(state_ptr, numel, sample_size, KIND)
        solve_threshold(
            state_ptr, sums_ptr, maxima_ptr, numel, programs, factor, 0, KIND, ROUNDS, SPAN
        )


def first_pass(ef: EFInput, search: Search, state: Tensor, packed: Tensor) -> FirstPassResult:
    """Searches the threshold and marks candidates; `residual_out` then holds the sum.

    Zeroes `packed` (int32) on the way.
    """
    x, residual, residual_out, decay, feedback = kernel_inputs(ef)
    programs, tiles = grid_of(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float64, device=x.device)
    maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
    words, spill = new_bitmask(x), new_spill_buffer(x, search.stage_factors)
    _first_pass_kernel[(programs,)](
        x, residual, residual_out, state, sums, maxima, words, spill.values, spill.used,
        spill.above, packed, decay, x.numel(), packed.numel(), search.factor, search.sample_size,
        *key_words(search.key), FEEDBACK=feedback, KIND=search.kind, SPAN=span(programs),
        ROUNDS=search.rounds, HEIGHT=HEIGHT, CAPACITY=spill.capacity, RUN=RUN, TILES=tiles,
        TILE=TILE, num_warps=8, maxnreg=REGISTERS,
        **(dependent_options(x) if uses_sample(search, x.numel()) else first_options(x)),
    )  # fmt: skip
    total = residual_out if feedback else x
    if search.kind == "excess":
        fit_stages(total, search, state, maxima, spill)
    else:
        refine(total, search, state, sums, maxima, words)
    return FirstPassResult(state, words, sums, maxima)
