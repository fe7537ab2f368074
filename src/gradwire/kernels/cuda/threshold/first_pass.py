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

from gradwire.kernels.cuda.random import KEYS, halves
from gradwire.kernels.cuda.threshold.bitmask import (
    first_marked,
    marks,
    most_marks,
    new_marks,
    store_marks,
)
from gradwire.kernels.cuda.threshold.dependent_launch import follows, in_turn, leads
from gradwire.kernels.cuda.threshold.histogram import (
    BEYOND,
    BINS,
    BRACKETS,
    COARSE,
    DRAWN,
    GUESS,
    HEAD,
    NEAR,
    ODD,
    ROWS,
    SAMPLE,
    SIZE,
    is_crowd,
    is_last,
    narrow,
    tally,
)
from gradwire.kernels.cuda.threshold.multistage import climb
from gradwire.kernels.cuda.threshold.passes import (
    TILE,
    added,
    clear,
    finite,
    highest,
    magnitude,
    number,
    sources,
    span,
    spread,
    summed,
)
from gradwire.kernels.cuda.threshold.refine import refine
from gradwire.kernels.cuda.threshold.sampled_bounds import Search, is_guessed
from gradwire.kernels.cuda.threshold.solve import decide
from gradwire.kernels.cuda.threshold.spill_buffer import (
    new_aside,
    none_aside,
    put_aside,
    tell_aside,
)
from gradwire.kernels.cuda.threshold.subsample import count_drawn
from gradwire.types import EFInput

HEIGHT = 4
RUN = 4
"""Tiles that are marked before the marked are counted."""
REGISTERS: int | None = 80
"""Of a thread: only what the last program does needs more, and fewer let more programs run."""


class Sifted(NamedTuple):
    state: Tensor
    words: Tensor
    """Marks on all that may be chosen, and some more; of "excess" only if the guess was right."""
    sums: Tensor
    tops: Tensor
    """What each program has summed up, and its largest magnitude."""


@triton.jit
def _close_in(state_ptr, numel, tried, KIND: tl.constexpr):
    """Goes on with the bins that the first pass has counted."""
    # Borders are decided by finite entries; all others are above those.
    others, above = tl.load(state_ptr + ODD), tl.load(state_ptr + BEYOND)
    for bracket in tl.static_range(3):
        ptr = state_ptr + BRACKETS + 4 * bracket
        tl.store(ptr + 2, above)
        if bracket < 2:
            tl.store(ptr + 3, tl.load(ptr + 3) + others)
    tl.debug_barrier()
    bracket = tl.arange(0, 4)
    narrow(state_ptr, bracket, bracket != SAMPLE, state_ptr + HEAD, COARSE, numel, BINS)
    if KIND == "sampled":
        narrow(state_ptr, bracket, bracket == SAMPLE, state_ptr + DRAWN, COARSE, tried, BINS)
    tl.debug_barrier()


@triton.jit
def _count_marked(state_ptr, size, here, guess, crowd):
    """Counts magnitudes from the guess on by the first bins; says which are apart from them.

    That is 1 for each that is not finite, and 2^16 for each beyond the bins.
    """
    near = here & (size - guess < NEAR)
    tally(state_ptr + HEAD, size, near, guess, COARSE, crowd, BINS)
    odd = here & (size >= 0x7F800000)
    return odd.to(tl.int32) + ((here & ~near).to(tl.int32) << 16)


@triton.jit
def _add_apart(state_ptr, apart):
    odd, beyond = tl.sum((apart & 0xFFFF).to(tl.int64)), tl.sum((apart >> 16).to(tl.int64))
    tl.atomic_add(state_ptr + ODD, odd, mask=odd > 0, sem="relaxed")
    tl.atomic_add(state_ptr + BEYOND, beyond, mask=beyond > 0, sem="relaxed")


@triton.jit
def _count_tiles(
    x_ptr, state_ptr, words_ptr, guess, begin, apart, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """The same of what was marked just now, and is still in the cache."""
    # Other threads have marked it.
    tl.debug_barrier()
    word, held = marks(words_ptr, begin, EACH, WORDS)
    turns = most_marks(held)
    size, here = first_marked(x_ptr, word, held)
    crowd = is_crowd(size, here & (size - guess < NEAR), guess, COARSE)
    while turns > 0:
        size, here = first_marked(x_ptr, word, held)
        apart += _count_marked(state_ptr, size, here, guess, crowd)
        held &= held - 1
        turns -= 1
    return apart


@triton.jit(do_not_specialize=["room", "factor", "tried", *KEYS])
def _sift_kernel(
    x_ptr, residual_ptr, left_ptr, state_ptr, sums_ptr, tops_ptr, words_ptr, values_ptr, helds_ptr,
    told_ptr, packed_ptr, decay, numel, room, factor, tried, key_low, key_high,
    FEEDBACK: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr, ROUNDS: tl.constexpr,
    HEIGHT: tl.constexpr, ASIDE: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    program, programs = tl.program_id(0), tl.num_programs(0)
    clear(packed_ptr, room, TILE)
    clear(state_ptr + ROWS, SIZE - ROWS, TILE)
    guess = tl.load(state_ptr + GUESS).to(tl.int32)
    total_ptr = left_ptr if FEEDBACK else x_ptr
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    THREADS: tl.constexpr = TILE // HEIGHT // 4
    sums = tl.zeros((THREADS,), tl.float64)
    squares = tl.zeros((THREADS,), tl.float64)
    top = tl.zeros((THREADS,), tl.int32)
    apart = tl.zeros((RUN * TILE // 32,), tl.int32)
    aside, brackets = none_aside(state_ptr)
    for first in range(0, TILES, RUN):
        for tile in range(first, min(first + RUN, TILES)):
            place = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
            total = added(x_ptr, residual_ptr, left_ptr, decay, place, place < numel, FEEDBACK)
            size = magnitude(total)
            fair = finite(size)
            top = tl.maximum(top, highest(fair))
            if KIND == "normal":
                wide = tl.where(size < 0x7F800000, total, 0.0).to(tl.float64)
                sums += summed(wide)
                squares += summed(wide * wide)
            elif KIND != "sampled":
                sums += summed(number(fair))
            aside = put_aside(values_ptr, fair, aside, brackets, ASIDE)
            # What lies outside is zero, and a guess is not.
            marked = tl.reshape(size, (TILE,)) >= guess
            store_marks(words_ptr, start + tile * TILE, marked, TILE)
            if TILES == 1 and KIND != "excess":
                # Nothing to wait for: this is all.
                flat = tl.reshape(size, (TILE,))
                crowd = tl.sum(marked.to(tl.int32)) * 8 > TILE
                _add_apart(state_ptr, _count_marked(state_ptr, flat, marked, guess, crowd))
        if TILES > 1 and KIND != "excess":
            apart = _count_tiles(
                total_ptr, state_ptr, words_ptr, guess, first * (TILE // 32), apart,
                TILES * TILE // 32, RUN * TILE // 32,
            )  # fmt: skip
    if TILES > 1 and KIND != "excess":
        _add_apart(state_ptr, apart)
    if KIND == "sampled":
        tl.debug_barrier()
        end = tl.minimum(start + TILES * TILE, numel)
        count_drawn(total_ptr, state_ptr, start, end, numel, tried, key_low, key_high)
    else:
        tl.store(sums_ptr + program, tl.sum(sums))
    if KIND == "normal":
        tl.store(sums_ptr + programs + program, tl.sum(squares))
    tell_aside(told_ptr, helds_ptr, aside, ASIDE)
    tl.store(tops_ptr + program, tl.max(top, 0))
    if is_last(state_ptr, 0):
        if KIND != "excess":
            _close_in(state_ptr, numel, tried, KIND)
        decide(state_ptr, sums_ptr, tops_ptr, numel, programs, factor, 0, KIND, ROUNDS, SPAN)


def sift(given: EFInput, search: Search, state: Tensor, packed: Tensor) -> Sifted:
    """The border that a search comes to, in the state, and marks; `residual_out` then holds the sum.

    `packed` (int32) is filled with zeros on the way.
    """
    x, residual, residual_out, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float64, device=x.device)
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    words, aside = new_marks(x), new_aside(x, search.rises)
    _sift_kernel[(programs,)](
        x, residual, residual_out, state, sums, tops, words, aside.values, aside.held, aside.told,
        packed, decay, x.numel(), packed.numel(), search.factor, search.tried, *halves(search.key),
        FEEDBACK=feedback, KIND=search.kind, SPAN=span(programs), ROUNDS=search.rounds,
        HEIGHT=HEIGHT, ASIDE=aside.room, RUN=RUN, TILES=tiles, TILE=TILE,
        num_warps=8, maxnreg=REGISTERS,
        **(follows(x) if is_guessed(search, x.numel()) else leads(x)),
    )  # fmt: skip
    total = residual_out if feedback else x
    if search.kind == "excess":
        climb(total, search, state, tops, aside)
    else:
        refine(total, search, state, sums, tops, words)
    return Sifted(state, words, sums, tops)
