"""Helpers of passes over a tensor: magnitudes, addition of the residual, and the grid.

Each program has a contiguous range of whole tiles. There are few enough programs for each to add up
the partial results of all before it.
"""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.types import EFInput

TILE = 4096
PROGRAMS = 2048
FEW_PROGRAMS = 256
ROWS = 4


@triton.jit
def magnitude(x):
    """Returns the bits of |x| as int32, which sort like the magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_or_zero(size):
    """Replaces the bits of infinity and NaN by zero."""
    return tl.where(size < 0x7F800000, size, 0)


@triton.jit
def to_float64(size):
    """Converts magnitudes (bits) to float64."""
    return size.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _quads(x):
    """Reshapes the lanes of rows into groups of four, as threads hold them."""
    HEIGHT: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1] // 4
    return tl.reshape(x, (HEIGHT, LANES, 4))


@triton.jit
def thread_sums(x):
    """Returns each thread's sum over the entries it holds of some rows."""
    return tl.sum(tl.sum(_quads(x), axis=2), axis=0)


@triton.jit
def thread_max(x):
    """Returns each thread's maximum over the entries it holds of some rows."""
    return tl.max(tl.max(_quads(x), axis=2), axis=0)


@triton.jit
def load_total(x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK: tl.constexpr):
    """Loads entries of x; with FEEDBACK adds the residual and stores the sum in `residual_out`."""
    total = tl.load(x_ptr + index, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + index, mask=inside, other=0.0)
        tl.store(residual_out_ptr + index, total, mask=inside)
    return total


@triton.jit
def clear(words_ptr, count, TILE: tl.constexpr):
    """Zeroes the program's share of some words."""
    words_each = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    start = tl.program_id(0).to(tl.int64) * words_each
    end = tl.minimum(start + words_each, count)
    while start < end:
        at = start + tl.arange(0, TILE)
        tl.store(words_ptr + at, tl.zeros((TILE,), words_ptr.dtype.element_ty), mask=at < end)
        start += TILE


@triton.jit
def sum_before(counts_ptr, program, PROGRAMS: tl.constexpr):
    """Returns the sum of the counts of the programs before this one, as int64."""
    other = tl.arange(0, PROGRAMS)
    return tl.sum(tl.load(counts_ptr + other, mask=other < program, other=0).to(tl.int64))


@triton.jit
def _count_reaching_kernel(
    x_ptr, residual_ptr, residual_out_ptr, thresholds_ptr, counts_ptr, decay, numel,
    FEEDBACK: tl.constexpr, FINITE: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds to `counts` how many magnitudes reach each of NUM thresholds, unless all are < 0."""
    thresholds = tl.load(thresholds_ptr + tl.arange(0, NUM))
    if tl.max(thresholds, 0) >= 0:
        row, lane = tl.arange(0, ROWS), tl.arange(0, TILE // ROWS)
        start = tl.program_id(0).to(tl.int64) * TILES * TILE
        counts = tl.zeros((NUM, TILE // ROWS), tl.int32)
        for tile in range(TILES):
            index = start + tile * TILE + row[:, None] * (TILE // ROWS) + lane[None, :]
            inside = index < numel
            size = magnitude(
                load_total(x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK)
            )
            if FINITE:
                size = finite_or_zero(size)
            size = tl.where(inside, size, -1)
            reach = size[None, :, :] >= thresholds[:, None, None]
            counts += tl.sum(reach.to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + tl.arange(0, NUM), tl.sum(counts, axis=1).to(tl.int64))


def span(programs: int) -> int:
    """Returns the padded number of programs; one of two, since kernels are compiled for each."""
    return FEW_PROGRAMS if programs <= FEW_PROGRAMS else PROGRAMS


def grid_of(numel: int) -> tuple[int, int]:
    """Returns the number of programs, and of tiles per program."""
    tiles = -(-numel // TILE)
    tiles_each = max(1, -(-tiles // PROGRAMS))
    return -(-tiles // tiles_each), tiles_each


def kernel_inputs(ef: EFInput) -> tuple[Tensor, Tensor, Tensor, float, bool]:
    """Returns x, residual, residual_out, decay, and whether the kernel has to add them."""
    x, residual, residual_out, decay = ef
    if residual is None or residual_out is None:
        total = ef.total()
        return total, total, total, 1.0, False
    return x, residual, residual_out, decay, True


def count_reaching(ef: EFInput, thresholds: Tensor, counts: Tensor, finite_only: bool) -> None:
    """Adds to `counts` (int64) how many entries of the sum reach each threshold; stores the sum."""
    x, residual, residual_out, decay, feedback = kernel_inputs(ef)
    programs, tiles = grid_of(x.numel())
    _count_reaching_kernel[(programs,)](
        x, residual, residual_out, thresholds, counts, decay, x.numel(),
        FEEDBACK=feedback, FINITE=finite_only, NUM=thresholds.numel(), ROWS=ROWS, TILES=tiles,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
