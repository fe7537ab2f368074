"""Stream compaction: drops candidates below the threshold, counts the rest, and plans the output.

The output offset of each program is the exclusive prefix sum of the counts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import ones
from gradwire.kernels.cuda.threshold.bitmask import (
    REGISTERS,
    first_marked,
    mark_from,
    marks,
    most_marks,
    together,
)
from gradwire.kernels.cuda.threshold.dependent_launch import follows, in_turn
from gradwire.kernels.cuda.threshold.first_pass import Sifted
from gradwire.kernels.cuda.threshold.histogram import (
    BORDER,
    BRACKETS,
    CUT,
    GUESS,
    MOST,
    ODD,
    OPEN,
    bounds,
    is_last,
)
from gradwire.kernels.cuda.threshold.passes import TILE, span, spread
from gradwire.kernels.cuda.threshold.refine import refine
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import rounded, top_of

PLAN = tl.constexpr(4)
"""Numbers of a plan before those of each program."""


@triton.jit
def _form(count, numel):
    """Width of the low bits of positions, and where they begin (the format: wire/indices.py)."""
    gap = numel // tl.maximum(count, 1)
    low = tl.full((), 0, tl.int64)
    while (gap >> (low + 1)) > 0:
        low += 1
    bits = count + ((numel - 1) >> low) + 1
    return low, (bits + 7) // 8 * 8


@triton.jit
def plan(
    state_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, programs, most,
    CUTS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How many are chosen before each program, and are on the border; then what all must know.

    Where nothing is cut, none counts as on the border. What comes out is how many are chosen.
    """
    other = tl.arange(0, SPAN)
    here = other < programs
    above = tl.load(counts_ptr + other, mask=here, other=0).to(tl.int64)
    count = tl.sum(above)
    before = tl.cumsum(above, 0) - above
    wanted = tl.full((), 1 << 62, tl.int64)
    if CUTS:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if tl.load(state_ptr + CUT) != 0:
            # Of the equal ones the first are chosen.
            wanted = most - count
            ties = tl.load(ties_ptr + other, mask=here, other=0).to(tl.int64)
            equal = tl.cumsum(ties, 0) - ties
            before += tl.minimum(equal, wanted)
            count += tl.minimum(tl.sum(ties), wanted)
            tl.store(plan_ptr + PLAN + programs + other, equal, mask=here)
    tl.store(plan_ptr + PLAN + other, before, mask=here)
    low, base = _form(count, tl.full((), 0, tl.int64) + numel)
    tl.store(plan_ptr, low)
    tl.store(plan_ptr + 1, base)
    tl.store(plan_ptr + 2, wanted)
    tl.store(count_ptr, count.to(tl.int32))
    return count


@triton.jit(do_not_specialize=["numel", "programs"])
def _plan_kernel(
    counts_ptr, plan_ptr, count_ptr, numel, programs, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    plan(
        counts_ptr, counts_ptr, counts_ptr, plan_ptr, count_ptr, numel, programs, 0, False, SPAN
    )  # fmt: skip


def new_plan(programs: int, device: torch.device) -> Tensor:
    return torch.empty(PLAN.value + 2 * programs, dtype=torch.int64, device=device)


def planned(counts: Tensor, count: Tensor, numel: int) -> Tensor:
    """The plan where all that is marked is told; how many that are goes to `count`."""
    programs = counts.numel()
    said = new_plan(programs, counts.device)
    _plan_kernel[(1,)](
        counts, said, count, numel, programs, SPAN=span(programs), num_warps=8, **follows(counts)
    )
    return said


LAUNCHES = {"once": 5, "first": 5, "again": 6}
"""The numbers of the launches that there are."""


class Thinned(NamedTuple):
    ties: Tensor
    plan: Tensor


@triton.jit
def _cut(state_ptr, tops_ptr, count, programs, most, least, SPAN: tl.constexpr):
    """Opens the bracket of the first that may not be chosen, if there are so many."""
    if count > most:
        odd = tl.load(state_ptr + ODD)
        among = odd > most
        top = rounded(top_of(tops_ptr, programs, SPAN))
        first = tl.where(among, 0x7F800000, least.to(tl.int64))
        last = tl.where(among, 0x7FFFFFFF, top)
        ptr = state_ptr + BRACKETS + 4 * MOST
        tl.store(ptr, first)
        tl.store(ptr + 1, last)
        tl.store(ptr + 2, tl.where(among, 0, odd))
        tl.store(ptr + 3, tl.full((), 1, tl.int64) + most)
        tl.store(state_ptr + CUT, 1)
        tl.store(state_ptr + OPEN, tl.where(first < last, 4, 0).to(tl.int64))


@triton.jit
def _walk(
    x_ptr, words_ptr, border, cut, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Takes marks away; how many are left, on the border where it is to be cut, and not finite."""
    above = tl.zeros((WORDS,), tl.int32)
    ties = tl.zeros((WORDS,), tl.int32)
    odd = tl.zeros((WORDS,), tl.int32)
    for begin in range(0, EACH, WORDS):
        word, held = marks(words_ptr, begin, EACH, WORDS)
        kept = tl.zeros_like(held)
        turns = most_marks(held)
        while turns > 0:
            size, here = first_marked(x_ptr, word, held)
            kept |= tl.where(size >= border, held & (0 - held), 0)
            ties += (here & cut & (size == border)).to(tl.int32)
            odd += (here & (size >= 0x7F800000)).to(tl.int32)
            held &= held - 1
            turns -= 1
        above += ones(kept).to(tl.int32)
        inside = begin + tl.arange(0, WORDS) < EACH
        tl.store(words_ptr + word, kept.to(tl.int32, bitcast=True), mask=inside)
    return tl.sum(above), tl.sum(ties), tl.sum(odd)


@triton.jit(do_not_specialize=["most"])
def _thin_kernel(
    x_ptr, state_ptr, tops_ptr, words_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, most,
    PART: tl.constexpr, LAUNCH: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Takes the marks from what does not reach the border; counts what does, and what is on it.

    What is on it counts apart only where not all of it may be chosen. The last program plans.
    """
    in_turn(EARLY)
    program, programs = tl.program_id(0), tl.num_programs(0)
    cut = tl.load(state_ptr + CUT) != 0
    if (PART != "again") | cut:
        last, _ = bounds(state_ptr, MOST)
        border = tl.where(cut, last, tl.maximum(tl.load(state_ptr + BORDER), 1)).to(tl.int32)
        ties = tl.full((), 0, tl.int32)
        if PART == "first":
            # A guess that misses has marked too few.
            if (TILES == 1) | (border < tl.load(state_ptr + GUESS)):
                above, odd = mark_from(x_ptr, words_ptr, border, numel, TILES, TILE)
            else:
                above, ties, odd = _walk(x_ptr, words_ptr, border, cut, TILES * TILE // 32, WORDS)
            tl.atomic_add(state_ptr + ODD, odd.to(tl.int64), mask=odd > 0, sem="relaxed")
        else:
            above, ties, odd = _walk(x_ptr, words_ptr, border, cut, TILES * TILE // 32, WORDS)
        tl.store(counts_ptr + program, above - ties)
        tl.store(ties_ptr + program, ties)
        tl.store(plan_ptr + PLAN + programs + program, 0)
        if is_last(state_ptr, LAUNCH):
            count = plan(
                state_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, programs, most, True,
                SPAN,
            )  # fmt: skip
            if PART == "first":
                tl.debug_barrier()
                _cut(state_ptr, tops_ptr, count, programs, most, border, SPAN)


def thin(
    x: Tensor, sifted: Sifted, search: Search, most: int, counts: Tensor, count: Tensor
) -> Thinned:
    """What tells each program which of its marks are on the border, and where they belong.

    Where no bins tell whether more reach the border than may be chosen, they are counted first,
    and thinned again if so.
    """
    programs, tiles = spread(x.numel())
    state, words, sums, tops = sifted
    ties = torch.empty_like(counts)
    said = new_plan(programs, x.device)

    def launch(part: str) -> None:
        _thin_kernel[(programs,)](
            x, state, tops, words, counts, ties, said, count, x.numel(), most, PART=part,
            LAUNCH=LAUNCHES[part], WORDS=together(words, programs), SPAN=span(programs),
            TILES=tiles, TILE=TILE, maxnreg=REGISTERS, **follows(x),
        )  # fmt: skip

    if search.kind == "excess":
        launch("first")
        refine(x, search, state, sums, tops, words)
        launch("again")
    else:
        launch("once")
    return Thinned(ties, said)
