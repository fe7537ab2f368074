"""Sums over the finite entries of a tensor, in float64, in an order that does not change.

Each program writes a sum of its own; who reads them adds them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.passes import ROWS, TILE, added, finite, magnitude, sources, spread
from laconic.types import Given


@triton.jit
def _statistics_kernel(
    x_ptr, residual_ptr, left_ptr, sums_ptr, tops_ptr, decay, numel, FEEDBACK: tl.constexpr,
    SQUARES: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row, lane = tl.arange(0, ROWS), tl.arange(0, TILE // ROWS)
    start = program.to(tl.int64) * TILES * TILE
    sums = tl.zeros((TILE // ROWS,), tl.float64)
    squares = tl.zeros((TILE // ROWS,), tl.float64)
    top = tl.zeros((TILE // ROWS,), tl.int32)
    for tile in range(TILES):
        place = start + tile * TILE + row[:, None] * (TILE // ROWS) + lane[None, :]
        total = added(x_ptr, residual_ptr, left_ptr, decay, place, place < numel, FEEDBACK)
        size = finite(magnitude(total))
        top = tl.maximum(top, tl.max(size, axis=0))
        if SQUARES:
            wide = tl.where(magnitude(total) < 0x7F800000, total, 0.0).to(tl.float64)
            sums += tl.sum(wide, axis=0)
            squares += tl.sum(wide * wide, axis=0)
        else:
            sums += tl.sum(size.to(tl.float32, bitcast=True).to(tl.float64), axis=0)
    tl.store(sums_ptr + program, tl.sum(sums))
    tl.store(tops_ptr + program, tl.max(top, 0))
    if SQUARES:
        tl.store(sums_ptr + programs + program, tl.sum(squares))


@triton.jit
def _excess_kernel(
    x_ptr, border_ptr, sums_ptr, counts_ptr, numel, ROWS: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, lane = tl.arange(0, ROWS), tl.arange(0, TILE // ROWS)
    start = program.to(tl.int64) * TILES * TILE
    border = tl.load(border_ptr)
    sums = tl.zeros((TILE // ROWS,), tl.float64)
    reach = tl.zeros((TILE // ROWS,), tl.int32)
    for tile in range(TILES):
        place = start + tile * TILE + row[:, None] * (TILE // ROWS) + lane[None, :]
        inside = place < numel
        total = tl.load(x_ptr + place, mask=inside, other=0.0)
        size = finite(magnitude(total)).to(tl.float32, bitcast=True)
        sums += tl.sum(tl.where(size > border, size - border, 0.0).to(tl.float64), axis=0)
        reach += tl.sum((inside & (size >= border)).to(tl.int32), axis=0)
    tl.store(sums_ptr + program, tl.sum(sums))
    tl.store(counts_ptr + program, tl.sum(reach))


def statistics(given: Given, squares: bool) -> tuple[Tensor, Tensor]:
    """By program: the sums of |x|, or of x and x^2, and the bits of the largest magnitude.

    `given.left` then holds the sum of gradient and residual.
    """
    x, residual, left, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    sums = torch.empty(1 + squares, programs, dtype=torch.float64, device=x.device)
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    _statistics_kernel[(programs,)](
        x, residual, left, sums, tops, decay, x.numel(),
        FEEDBACK=feedback, SQUARES=squares, ROWS=ROWS, TILES=tiles, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return sums, tops


def excess(given: Given, border: Tensor, sums: Tensor, counts: Tensor) -> None:
    """By program: what magnitudes have above the border, and how many reach it."""
    programs, tiles = spread(given.x.numel())
    _excess_kernel[(programs,)](
        given.x,
        border,
        sums,
        counts,
        given.x.numel(),
        ROWS=ROWS,
        TILES=tiles,
        TILE=TILE,
        num_warps=8,
    )
