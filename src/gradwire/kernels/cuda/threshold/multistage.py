"""Multistage thresholds: each stage is fitted to the entries above the threshold of the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.dependent_launch import follows, in_turn
from gradwire.kernels.cuda.threshold.histogram import BORDER, EXACT, is_last
from gradwire.kernels.cuda.threshold.passes import TILE, finite, magnitude, number, span, spread
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import double, note, sum_of, top_of
from gradwire.kernels.cuda.threshold.spill_buffer import FORESEEN, Aside, is_told, summed_aside

HEIGHT = 4
REGISTERS: int | None = 48
"""Of a thread: with more, fewer programs run side by side."""
FIRST_LAUNCH = tl.constexpr(8)


@triton.jit
def _summed(
    x_ptr, program, border, numel, HEIGHT: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Sum (float64) and number of a program's magnitudes that reach a border (bits)."""
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    sums = tl.zeros((TILE // HEIGHT,), tl.float64)
    reach = tl.zeros((TILE // HEIGHT,), tl.int32)
    for tile in range(TILES):
        place = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
        inside = place < numel
        size = finite(magnitude(tl.load(x_ptr + place, mask=inside, other=0.0)))
        here = inside & (size >= border)
        sums += tl.sum(number(tl.where(here, size, 0)), axis=0)
        reach += tl.sum(here.to(tl.int32), axis=0)
    return tl.sum(sums), tl.sum(reach)


@triton.jit(do_not_specialize=["rise", "launch"])
def _excess_kernel(
    x_ptr, state_ptr, sums_ptr, counts_ptr, tops_ptr, values_ptr, helds_ptr, told_ptr, numel,
    rise, launch, HEIGHT: tl.constexpr, ASIDE: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The border rises by `rise` mean excesses of those that reach it."""
    in_turn(EARLY)
    programs = tl.num_programs(0)
    # Every other pass goes backwards: it begins with what the one before has left in the cache.
    program = tl.where(launch % 2 == 0, programs - 1 - tl.program_id(0), tl.program_id(0))
    border = tl.load(state_ptr + BORDER).to(tl.int32)
    if ASIDE:
        bracket = launch - FIRST_LAUNCH
        if is_told(state_ptr, helds_ptr, program, bracket, border, ASIDE):
            total, reach = summed_aside(
                values_ptr, helds_ptr, told_ptr, state_ptr, program, bracket, border, ASIDE
            )
        else:
            total, reach = _summed(x_ptr, program, border, numel, HEIGHT, TILES, TILE)
    else:
        total, reach = _summed(x_ptr, program, border, numel, HEIGHT, TILES, TILE)
    tl.store(sums_ptr + program, total)
    tl.store(counts_ptr + program, reach)
    if is_last(state_ptr, launch):
        mean = sum_of(sums_ptr, programs, SPAN) / sum_of(counts_ptr, programs, SPAN)
        over = tl.maximum(mean - number(border), 0.0)
        exact = double(tl.load(state_ptr + EXACT)) + over * double(rise)
        note(state_ptr, tl.minimum(exact, top_of(tops_ptr, programs, SPAN)))


def climb(x: Tensor, search: Search, state: Tensor, tops: Tensor, aside: Aside) -> None:
    """Lets the border in the state rise as often as is asked for."""
    programs, tiles = spread(x.numel())
    sums = torch.empty(programs if search.rises else 0, dtype=torch.float64, device=x.device)
    counts = torch.empty_like(tops)
    for stage, rise in enumerate(search.rises):
        _excess_kernel[(programs,)](
            x, state, sums, counts, tops, aside.values, aside.held, aside.told, x.numel(),
            rise, FIRST_LAUNCH.value + stage, HEIGHT=HEIGHT,
            ASIDE=aside.room if stage < FORESEEN.value else 0, TILES=tiles, TILE=TILE,
            SPAN=span(programs), num_warps=8, maxnreg=REGISTERS, **follows(x),
        )  # fmt: skip
