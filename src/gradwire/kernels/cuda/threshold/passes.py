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
FEW = 256
ROWS = 4


@triton.jit
def magnitude(x):
    """The bits of |x| as int32, which sort as the magnitudes do, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite(size):
    """Magnitudes (bits) with those of infinity and NaN taken as zero."""
    return tl.where(size < 0x7F800000, size, 0)


@triton.jit
def number(size):
    """Magnitudes (bits) as numbers in float64."""
    return size.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _quads(x):
    """Rows with their lanes by fours, as threads hold them."""
    HEIGHT: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1] // 4
    return tl.reshape(x, (HEIGHT, LANES, 4))


@triton.jit
def summed(x):
    """The sums of what each thread holds of some rows."""
    return tl.sum(tl.sum(_quads(x), axis=2), axis=0)


@triton.jit
def highest(x):
    """The largest of what each thread holds of some rows."""
    return tl.max(tl.max(_quads(x), axis=2), axis=0)


@triton.jit
def added(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK: tl.constexpr):
    """Entries of x, and of the residual with FEEDBACK, when their sum goes to `residual_out`."""
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=inside, other=0.0)
        tl.store(left_ptr + place, total, mask=inside)
    return total


@triton.jit
def clear(words_ptr, room, TILE: tl.constexpr):
    """Zeros in this program's share of some words."""
    share = (room + tl.num_programs(0) - 1) // tl.num_programs(0)
    start = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(start + share, room)
    while start < end:
        at = start + tl.arange(0, TILE)
        tl.store(words_ptr + at, tl.zeros((TILE,), words_ptr.dtype.element_ty), mask=at < end)
        start += TILE


@triton.jit
def sum_before(counts_ptr, program, PROGRAMS: tl.constexpr):
    """The sum of what the programs before this one have counted, as int64."""
    other = tl.arange(0, PROGRAMS)
    return tl.sum(tl.load(counts_ptr + other, mask=other < program, other=0).to(tl.int64))


@triton.jit
def probe_kernel(
    x_ptr, residual_ptr, left_ptr, borders_ptr, counts_ptr, decay, numel,
    FEEDBACK: tl.constexpr, FINITE: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds to `counts` how many magnitudes reach each of MANY borders; one below 0 ends it."""
    borders = tl.load(borders_ptr + tl.arange(0, MANY))
    if tl.max(borders, 0) >= 0:
        row, lane = tl.arange(0, ROWS), tl.arange(0, TILE // ROWS)
        start = tl.program_id(0).to(tl.int64) * TILES * TILE
        found = tl.zeros((MANY, TILE // ROWS), tl.int32)
        for tile in range(TILES):
            place = start + tile * TILE + row[:, None] * (TILE // ROWS) + lane[None, :]
            inside = place < numel
            size = magnitude(added(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK))
            if FINITE:
                size = finite(size)
            size = tl.where(inside, size, -1)
            reach = size[None, :, :] >= borders[:, None, None]
            found += tl.sum(reach.to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + tl.arange(0, MANY), tl.sum(found, axis=1).to(tl.int64))


def span(programs: int) -> int:
    """Room for what so many programs have left; one of two, since for each kernels are compiled."""
    return FEW if programs <= FEW else PROGRAMS


def spread(numel: int) -> tuple[int, int]:
    """How many programs, and how many tiles each of them has."""
    tiles = -(-numel // TILE)
    each = max(1, -(-tiles // PROGRAMS))
    return -(-tiles // each), each


def sources(given: EFInput) -> tuple[Tensor, Tensor, Tensor, float, bool]:
    """x, residual, left, decay, and whether a pass has to add them up."""
    x, residual, residual_out, decay = given
    if residual is None or residual_out is None:
        total = given.total()
        return total, total, total, 1.0, False
    return x, residual, residual_out, decay, True


def probe(given: EFInput, borders: Tensor, counts: Tensor, finite_only: bool) -> None:
    """Adds to `counts` (int64) how many of the sum reach each border; `residual_out` then holds the sum."""
    x, residual, residual_out, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    probe_kernel[(programs,)](
        x, residual, residual_out, borders, counts, decay, x.numel(),
        FEEDBACK=feedback, FINITE=finite_only, MANY=borders.numel(), ROWS=ROWS, TILES=tiles,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
