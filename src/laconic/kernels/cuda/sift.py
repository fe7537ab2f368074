"""A border and marks on what may reach it, by one pass over memory and short ones over the marked.

A sample guesses a magnitude that a little more entries reach than may be chosen. The pass that adds
the residual marks those, counts them by bins and takes sums; what it cannot decide is counted again
among the marked, in smaller bins. A guess that misses makes the next pass mark all.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.bits import lowest_bit
from laconic.kernels.cuda.brackets import (
    BEYOND,
    BINS,
    BRACKETS,
    COARSE,
    EXACT,
    GUESS,
    HEAD,
    MISSED,
    NEAR,
    ODD,
    OPEN,
    ROW,
    bounds,
    counted,
    is_last,
    narrow,
    tally,
    width,
)
from laconic.kernels.cuda.decide import decide, double, settle
from laconic.kernels.cuda.excess import climb
from laconic.kernels.cuda.guess import Search
from laconic.kernels.cuda.marks import WORDS, marks, most_marks, new_marks, store_marks
from laconic.kernels.cuda.passes import TILE, added, clear, finite, magnitude, sources, spread
from laconic.types import Given

HEIGHT = 4
LEVELS = 3
"""Passes over the marked: enough for bins of one number whatever the guess was."""


class Sifted(NamedTuple):
    state: Tensor
    words: Tensor
    """Marks on all that may be chosen, and some more."""


@triton.jit(do_not_specialize=["factor"])
def _sift_kernel(
    x_ptr, residual_ptr, left_ptr, state_ptr, sums_ptr, tops_ptr, words_ptr, packed_ptr, decay,
    numel, room, factor, FEEDBACK: tl.constexpr, KIND: tl.constexpr, BINS: tl.constexpr,
    HEAD: tl.constexpr, SPAN: tl.constexpr, ROUNDS: tl.constexpr, HEIGHT: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    clear(packed_ptr, room, TILE)
    guess = tl.load(state_ptr + GUESS).to(tl.int32)
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    sums = tl.zeros((TILE // HEIGHT,), tl.float64)
    squares = tl.zeros((TILE // HEIGHT,), tl.float64)
    top = tl.zeros((TILE // HEIGHT,), tl.int32)
    odd = tl.zeros((TILE // HEIGHT,), tl.int32)
    beyond = 0
    for tile in range(TILES):
        place = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
        total = added(x_ptr, residual_ptr, left_ptr, decay, place, place < numel, FEEDBACK)
        size = magnitude(total)
        known = size < 0x7F800000
        odd += tl.sum((~known).to(tl.int32), axis=0)
        top = tl.maximum(top, tl.max(finite(size), axis=0))
        if KIND == "normal":
            wide = tl.where(known, total, 0.0).to(tl.float64)
            sums += tl.sum(wide, axis=0)
            squares += tl.sum(wide * wide, axis=0)
        elif KIND != "sampled":
            sums += tl.sum(finite(size).to(tl.float32, bitcast=True).to(tl.float64), axis=0)
        # What lies outside is zero, and a guess is not.
        flat = tl.reshape(size, (TILE,))
        marked = flat >= guess
        store_marks(words_ptr, start + tile * TILE, marked, TILE)
        near = marked & (flat - guess < NEAR)
        beyond += tl.sum((marked & ~near).to(tl.int32))
        tally(state_ptr + HEAD, flat, near, guess, COARSE, BINS)
    tl.store(sums_ptr + program, tl.sum(sums))
    if KIND == "normal":
        tl.store(sums_ptr + programs + program, tl.sum(squares))
    tl.store(tops_ptr + program, tl.max(top, 0))
    tl.atomic_add(state_ptr + ODD, tl.sum(odd).to(tl.int64), sem="relaxed")
    tl.atomic_add(state_ptr + BEYOND, tl.full((), 0, tl.int64) + beyond, sem="relaxed")
    if is_last(state_ptr, 0):
        # Borders are decided by finite entries; all others are above those.
        others, above = tl.load(state_ptr + ODD), tl.load(state_ptr + BEYOND)
        for bracket in tl.static_range(3):
            ptr = state_ptr + BRACKETS + 4 * bracket
            tl.store(ptr + 2, above)
            if bracket < 2:
                tl.store(ptr + 3, tl.load(ptr + 3) + others)
        tl.debug_barrier()
        reach = counted(state_ptr, 0, BINS, HEAD)
        for bracket in tl.static_range(3):
            narrow(state_ptr, bracket, reach, COARSE, numel, BINS)
        tl.debug_barrier()
        decide(state_ptr, sums_ptr, tops_ptr, numel, programs, factor, KIND, ROUNDS, SPAN)


@triton.jit
def _bracket(state_ptr, bracket, asked, BINS: tl.constexpr):
    """First and last magnitude and log2 of a bin, as int32; an empty one if none is asked for."""
    first, last = bounds(state_ptr, bracket)
    last = tl.where(asked, last, first)
    return first.to(tl.int32), last.to(tl.int32), width(first, last, BINS).to(tl.int32)


@triton.jit
def _count(bins_ptr, size, here, first, last, shift, BINS: tl.constexpr):
    if first < last:
        tally(bins_ptr, size, here & (size >= first) & (size <= last), first, shift, BINS)


@triton.jit(do_not_specialize=["factor", "level"])
def _refine_kernel(
    x_ptr, state_ptr, sums_ptr, tops_ptr, words_ptr, numel, factor, level,
    FIRST: tl.constexpr, KIND: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr,
    SPAN: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Counts in smaller bins, where that is needed."""
    asked = tl.load(state_ptr + OPEN)
    if asked != 0:
        row = ROW + 3 * level
        bins_ptr = state_ptr + HEAD + row * BINS
        if FIRST:  # noqa: SIM102 - known when it is compiled
            if tl.load(state_ptr + MISSED) != 0:
                start = tl.program_id(0).to(tl.int64) * TILES * TILE
                for tile in range(TILES):
                    place = start + tile * TILE + tl.arange(0, TILE)
                    size = magnitude(tl.load(x_ptr + place, mask=place < numel, other=0.0))
                    store_marks(words_ptr, start + tile * TILE, size > 0, TILE)
                tl.debug_barrier()
        few_first, few_last, few_shift = _bracket(state_ptr, 0, asked == 1, BINS)
        many_first, many_last, many_shift = _bracket(state_ptr, 1, asked == 1, BINS)
        most_first, most_last, most_shift = _bracket(state_ptr, 2, asked > 0, BINS)
        for begin in range(0, TILES * TILE // 32, WORDS):
            word, held = marks(words_ptr, begin, TILES * TILE // 32, WORDS)
            turns = most_marks(held)
            while turns > 0:
                here = held != 0
                place = word * 32 + lowest_bit(held).to(tl.int64)
                size = magnitude(tl.load(x_ptr + place, mask=here, other=0.0))
                _count(bins_ptr, size, here, few_first, few_last, few_shift, BINS)
                _count(bins_ptr + BINS, size, here, many_first, many_last, many_shift, BINS)
                _count(bins_ptr + 2 * BINS, size, here, most_first, most_last, most_shift, BINS)
                held &= held - 1
                turns -= 1
        if is_last(state_ptr, 1 + level):
            for bracket in tl.static_range(3):
                first, last = bounds(state_ptr, bracket)
                if (first < last) & ((asked == 1) | (bracket == 2)):
                    reach = counted(state_ptr, row + bracket, BINS, HEAD)
                    narrow(state_ptr, bracket, reach, width(first, last, BINS), numel, BINS)
            tl.debug_barrier()
            programs = tl.num_programs(0)
            if KIND == "excess":
                settle(state_ptr, double(tl.load(state_ptr + EXACT)), programs < 0)
            else:
                decide(state_ptr, sums_ptr, tops_ptr, numel, programs, factor, KIND, ROUNDS, SPAN)


def sift(given: Given, search: Search, state: Tensor, packed: Tensor) -> Sifted:
    """The border that a search comes to, in the state, and marks; `left` then holds the sum.

    `packed` (int32) is filled with zeros on the way.
    """
    x, residual, left, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float64, device=x.device)
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    words = new_marks(x)
    common = {
        "KIND": search.kind, "ROUNDS": search.rounds, "SPAN": triton.next_power_of_2(programs),
        "BINS": BINS, "HEAD": HEAD, "TILES": tiles, "TILE": TILE,
    }  # fmt: skip
    _sift_kernel[(programs,)](
        x, residual, left, state, sums, tops, words, packed, decay, x.numel(), packed.numel(),
        search.factor, FEEDBACK=feedback, HEIGHT=HEIGHT, num_warps=8,
        **common,
    )  # fmt: skip
    total = left if feedback else x
    climb(total, search, state, tops)
    for level in range(LEVELS):
        _refine_kernel[(programs,)](
            total, state, sums, tops, words, x.numel(), search.factor, level,
            FIRST=level == 0, WORDS=WORDS, **common,
        )  # fmt: skip
    return Sifted(state, words)
