"""Stream compaction: drops candidates below the threshold, counts the rest, and plans the output.

The output offset of each program is the exclusive prefix sum of the counts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import popcount
from gradwire.kernels.cuda.threshold.bitmask import (
    REGISTERS,
    first_marked,
    load_words,
    mark_reaching,
    max_popcount,
    words_per_step,
)
from gradwire.kernels.cuda.threshold.dependent_launch import dependent_options, wait_for_previous
from gradwire.kernels.cuda.threshold.first_pass import FirstPassResult
from gradwire.kernels.cuda.threshold.histogram import (
    INTERVALS,
    LIMIT,
    NONFINITE,
    OVER_LIMIT,
    SAMPLED_BOUND,
    THRESHOLD,
    UNDECIDED,
    bounds,
    is_last,
)
from gradwire.kernels.cuda.threshold.passes import TILE, grid_of, span
from gradwire.kernels.cuda.threshold.refine import refine
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import float32_bits, max_of

PLAN_HEADER = tl.constexpr(4)
"""Numbers of a plan before those of each program."""


@triton.jit
def _index_layout(count, numel):
    """Returns the width of the low bits of positions, and where they begin (wire/indices.py).

    The width is -1 if a plain bitmap is shorter: `low_bits` of kernels/reference/packing.py.
    """
    gap = numel // tl.maximum(count, 1)
    low = tl.full((), 0, tl.int64)
    while (gap >> (low + 1)) > 0:
        low += 1
    map_bytes = (count + ((numel - 1) >> low) + 1 + 7) // 8
    plain = (numel + 7) // 8 < map_bytes + (count * low + 7) // 8
    return tl.where(plain, -1, low), map_bytes * 8


@triton.jit
def plan_output(
    state_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, programs, max_count,
    LIMITED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Stores the output offset and the preceding ties of each program, then shared parameters.

    If the limit is not exceeded, no entry counts as a tie. Returns how many entries are selected.
    """
    program = tl.arange(0, SPAN)
    here = program < programs
    above = tl.load(counts_ptr + program, mask=here, other=0).to(tl.int64)
    count = tl.sum(above)
    before = tl.cumsum(above, 0) - above
    ties_wanted = tl.full((), 1 << 62, tl.int64)
    if LIMITED:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if tl.load(state_ptr + OVER_LIMIT) != 0:
            # The first of the equal ones are selected.
            ties_wanted = max_count - count
            ties = tl.load(ties_ptr + program, mask=here, other=0).to(tl.int64)
            ties_before = tl.cumsum(ties, 0) - ties
            before += tl.minimum(ties_before, ties_wanted)
            count += tl.minimum(tl.sum(ties), ties_wanted)
            tl.store(plan_ptr + PLAN_HEADER + programs + program, ties_before, mask=here)
    tl.store(plan_ptr + PLAN_HEADER + program, before, mask=here)
    low, base = _index_layout(count, tl.full((), 0, tl.int64) + numel)
    tl.store(plan_ptr, low)
    tl.store(plan_ptr + 1, base)
    tl.store(plan_ptr + 2, ties_wanted)
    tl.store(count_ptr, count.to(tl.int32))
    return count


@triton.jit(do_not_specialize=["numel", "programs"])
def _plan_kernel(
    counts_ptr, plan_ptr, count_ptr, numel, programs, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    plan_output(
        counts_ptr, counts_ptr, counts_ptr, plan_ptr, count_ptr, numel, programs, 0, False, SPAN
    )  # fmt: skip


def new_plan(programs: int, device: torch.device) -> Tensor:
    return torch.empty(PLAN_HEADER.value + 2 * programs, dtype=torch.int64, device=device)


def plan_marked(counts: Tensor, count: Tensor, numel: int) -> Tensor:
    """Returns the plan to emit all marked entries, and stores their number in `count`."""
    programs = counts.numel()
    plan = new_plan(programs, counts.device)
    _plan_kernel[(1,)](
        counts, plan, count, numel, programs, SPAN=span(programs), num_warps=8,
        **dependent_options(counts),
    )  # fmt: skip
    return plan


LAUNCHES = {"once": 5, "first": 5, "again": 6}
"""Launch numbers by part."""


class Compacted(NamedTuple):
    ties: Tensor
    plan: Tensor


@triton.jit
def _open_limit(state_ptr, maxima_ptr, count, programs, max_count, threshold, SPAN: tl.constexpr):
    """Opens the interval of the first rank over the limit, if the limit is exceeded."""
    if count > max_count:
        nonfinite = tl.load(state_ptr + NONFINITE)
        among_nonfinite = nonfinite > max_count
        largest = float32_bits(max_of(maxima_ptr, programs, SPAN))
        first = tl.where(among_nonfinite, 0x7F800000, threshold.to(tl.int64))
        last = tl.where(among_nonfinite, 0x7FFFFFFF, largest)
        ptr = state_ptr + INTERVALS + 4 * LIMIT
        tl.store(ptr, first)
        tl.store(ptr + 1, last)
        tl.store(ptr + 2, tl.where(among_nonfinite, 0, nonfinite))
        tl.store(ptr + 3, tl.full((), 1, tl.int64) + max_count)
        tl.store(state_ptr + OVER_LIMIT, 1)
        tl.store(state_ptr + UNDECIDED, tl.where(first < last, 4, 0).to(tl.int64))


@triton.jit
def _compact_words(
    x_ptr, words_ptr, threshold, over_limit, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Clears bits below the threshold; returns how many entries are left, ties, and not finite."""
    above = tl.zeros((WORDS,), tl.int32)
    ties = tl.zeros((WORDS,), tl.int32)
    nonfinite = tl.zeros((WORDS,), tl.int32)
    for begin in range(0, EACH, WORDS):
        word, bits = load_words(words_ptr, begin, EACH, WORDS)
        remaining = tl.zeros_like(bits)
        steps = max_popcount(bits)
        while steps > 0:
            size, here = first_marked(x_ptr, word, bits)
            remaining |= tl.where(size >= threshold, bits & (0 - bits), 0)
            ties += (here & over_limit & (size == threshold)).to(tl.int32)
            nonfinite += (here & (size >= 0x7F800000)).to(tl.int32)
            bits &= bits - 1
            steps -= 1
        above += popcount(remaining).to(tl.int32)
        inside = begin + tl.arange(0, WORDS) < EACH
        tl.store(words_ptr + word, remaining.to(tl.int32, bitcast=True), mask=inside)
    return tl.sum(above), tl.sum(ties), tl.sum(nonfinite)


@triton.jit(do_not_specialize=["max_count"])
def _compact_kernel(
    x_ptr, state_ptr, maxima_ptr, words_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel,
    max_count, PART: tl.constexpr, LAUNCH: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Unmarks entries below the threshold, and counts those left and those equal to it.

    Equal ones count separately only if not all of them may be selected. The last program plans.
    """
    wait_for_previous(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    over_limit = tl.load(state_ptr + OVER_LIMIT) != 0
    if (PART != "again") | over_limit:
        last, _ = bounds(state_ptr, LIMIT)
        threshold = tl.where(over_limit, last, tl.maximum(tl.load(state_ptr + THRESHOLD), 1)).to(
            tl.int32
        )
        ties = tl.full((), 0, tl.int32)
        if PART == "first":
            # If the sampled bound was too high, too few are marked.
            if (TILES == 1) | (threshold < tl.load(state_ptr + SAMPLED_BOUND)):
                above, nonfinite = mark_reaching(x_ptr, words_ptr, threshold, numel, TILES, TILE)
            else:
                above, ties, nonfinite = _compact_words(
                    x_ptr, words_ptr, threshold, over_limit, TILES * TILE // 32, WORDS
                )
            tl.atomic_add(
                state_ptr + NONFINITE, nonfinite.to(tl.int64), mask=nonfinite > 0, sem="relaxed"
            )
        else:
            above, ties, nonfinite = _compact_words(
                x_ptr, words_ptr, threshold, over_limit, TILES * TILE // 32, WORDS
            )
        tl.store(counts_ptr + program, above - ties)
        tl.store(ties_ptr + program, ties)
        tl.store(plan_ptr + PLAN_HEADER + programs + program, 0)
        if is_last(state_ptr, LAUNCH):
            count = plan_output(
                state_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, programs, max_count,
                True, SPAN,
            )  # fmt: skip
            if PART == "first":
                tl.debug_barrier()
                _open_limit(state_ptr, maxima_ptr, count, programs, max_count, threshold, SPAN)


def compact(
    x: Tensor, first: FirstPassResult, search: Search, max_count: int, counts: Tensor, count: Tensor
) -> Compacted:
    """Returns the ties of each program and the output plan.

    Without bins that show whether more entries reach the threshold than may be selected, they are
    counted first, and compacted again if so.
    """
    programs, tiles = grid_of(x.numel())
    state, words, sums, maxima = first
    ties = torch.empty_like(counts)
    plan = new_plan(programs, x.device)

    def launch(part: str) -> None:
        _compact_kernel[(programs,)](
            x, state, maxima, words, counts, ties, plan, count, x.numel(), max_count, PART=part,
            LAUNCH=LAUNCHES[part], WORDS=words_per_step(words, programs), SPAN=span(programs),
            TILES=tiles, TILE=TILE, maxnreg=REGISTERS, **dependent_options(x),
        )  # fmt: skip

    if search.kind == "excess":
        launch("first")
        refine(x, search, state, sums, maxima, words)
        launch("again")
    else:
        launch("once")
    return Compacted(ties, plan)
