"""Multistage thresholds: each stage is fitted to the entries above the threshold of the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.dependent_launch import dependent_options, wait_for_previous
from gradwire.kernels.cuda.threshold.histogram import THRESHOLD, THRESHOLD_F64, is_last
from gradwire.kernels.cuda.threshold.passes import (
    TILE,
    finite_or_zero,
    grid_of,
    magnitude,
    span,
    to_float64,
)
from gradwire.kernels.cuda.threshold.sampled_bounds import Search
from gradwire.kernels.cuda.threshold.solve import as_float64, max_of, store_threshold, sum_of
from gradwire.kernels.cuda.threshold.spill_buffer import PREDICTED, SpillBuffer, covers, sum_spilled

HEIGHT = 4
REGISTERS: int | None = 48
"""Registers per thread: with more, fewer programs run at once."""
FIRST_LAUNCH = tl.constexpr(8)


@triton.jit
def _sum_reaching(
    x_ptr, program, threshold, numel, HEIGHT: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Returns sum (float64) and number of a program's magnitudes that reach a threshold (bits)."""
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    sums = tl.zeros((TILE // HEIGHT,), tl.float64)
    count = tl.zeros((TILE // HEIGHT,), tl.int32)
    for tile in range(TILES):
        index = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
        inside = index < numel
        size = finite_or_zero(magnitude(tl.load(x_ptr + index, mask=inside, other=0.0)))
        here = inside & (size >= threshold)
        sums += tl.sum(to_float64(tl.where(here, size, 0)), axis=0)
        count += tl.sum(here.to(tl.int32), axis=0)
    return tl.sum(sums), tl.sum(count)


@triton.jit(do_not_specialize=["stage_factor", "launch"])
def _stage_kernel(
    x_ptr, state_ptr, sums_ptr, counts_ptr, maxima_ptr, values_ptr, used_ptr, above_ptr, numel,
    stage_factor, launch, HEIGHT: tl.constexpr, CAPACITY: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Raises the threshold by `stage_factor` times the mean excess of the entries that reach it."""
    wait_for_previous(PDL)
    programs = tl.num_programs(0)
    # Every other pass runs backwards, to begin with what the previous one left in the cache.
    program = tl.where(launch % 2 == 0, programs - 1 - tl.program_id(0), tl.program_id(0))
    threshold = tl.load(state_ptr + THRESHOLD).to(tl.int32)
    if CAPACITY:
        interval = launch - FIRST_LAUNCH
        if covers(state_ptr, used_ptr, program, interval, threshold, CAPACITY):
            total, count = sum_spilled(
                values_ptr, used_ptr, above_ptr, state_ptr, program, interval, threshold, CAPACITY
            )
        else:
            total, count = _sum_reaching(x_ptr, program, threshold, numel, HEIGHT, TILES, TILE)
    else:
        total, count = _sum_reaching(x_ptr, program, threshold, numel, HEIGHT, TILES, TILE)
    tl.store(sums_ptr + program, total)
    tl.store(counts_ptr + program, count)
    if is_last(state_ptr, launch):
        mean = sum_of(sums_ptr, programs, SPAN) / sum_of(counts_ptr, programs, SPAN)
        excess = tl.maximum(mean - to_float64(threshold), 0.0)
        exact = as_float64(tl.load(state_ptr + THRESHOLD_F64)) + excess * as_float64(stage_factor)
        store_threshold(state_ptr, tl.minimum(exact, max_of(maxima_ptr, programs, SPAN)))


def fit_stages(
    x: Tensor, search: Search, state: Tensor, maxima: Tensor, spill: SpillBuffer
) -> None:
    """Raises the threshold in the state once per stage factor."""
    programs, tiles = grid_of(x.numel())
    sums = torch.empty(
        programs if search.stage_factors else 0, dtype=torch.float64, device=x.device
    )
    counts = torch.empty_like(maxima)
    for stage, stage_factor in enumerate(search.stage_factors):
        _stage_kernel[(programs,)](
            x, state, sums, counts, maxima, spill.values, spill.used, spill.above, x.numel(),
            stage_factor, FIRST_LAUNCH.value + stage, HEIGHT=HEIGHT,
            CAPACITY=spill.capacity if stage < PREDICTED.value else 0, TILES=tiles, TILE=TILE,
            SPAN=span(programs), num_warps=8, maxnreg=REGISTERS, **dependent_options(x),
        )  # fmt: skip
