"""Predicted bounds of the later thresholds, and a spill buffer of the entries inside them.

A sample predicts where the thresholds of a multistage search will lie. The first pass writes the
entries inside those bounds to the spill buffer and sums up those above, so the sum above a later
threshold needs no pass over memory. Where a threshold lies outside its bounds, or the buffer was
too small, there is one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.histogram import AGAIN, AHEAD
from gradwire.kernels.cuda.threshold.passes import TILE, finite, number, spread, summed

FORESEEN = tl.constexpr(2)
"""Borders: those that come after need a pass over memory each."""
DEVIATIONS = tl.constexpr(3.0)
"""Of the sample's fit, to either side of a border."""


@triton.jit
def _bits(value):
    """A float64 as the bits of a magnitude above zero, as int64."""
    bits = tl.maximum(value, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(bits, 1).to(tl.int64)


@triton.jit
def _fitted(value, here, border, rise):
    """How far a border rises by those of a sample that reach it, and the variance of that."""
    here &= value >= border
    reach = tl.sum(here.to(tl.float64))
    over = tl.where(here, value - border, 0.0)
    mean = tl.sum(over) / reach
    variance = tl.maximum(tl.sum(over * over) / reach - mean * mean, 0.0) / reach
    return rise * mean, rise * rise * variance


@triton.jit
def foresee(state_ptr, sizes, factor, rise):
    """Notes between which magnitudes the first two borders will be; a size below 0 is none."""
    here = sizes >= 0
    value = number(finite(tl.maximum(sizes, 0)))
    top = tl.max(value, 0)
    border = top * 0.0
    doubt = border
    for bracket in tl.static_range(FORESEEN):
        step = (factor if bracket == 0 else rise).to(tl.int64).to(tl.float64, bitcast=True)
        over, variance = _fitted(value, here, border, step)
        border = tl.minimum(border + over, top)
        doubt += variance
        margin = DEVIATIONS * tl.sqrt(doubt)
        tl.store(state_ptr + AHEAD + 2 * bracket, _bits(border - margin))
        tl.store(state_ptr + AHEAD + 2 * bracket + 1, _bits(border + margin))


@triton.jit
def bracket_ahead(state_ptr, bracket):
    """First magnitude put aside for a border, and first beyond, as int32."""
    ptr = state_ptr + AHEAD + 2 * bracket
    return tl.load(ptr).to(tl.int32), tl.load(ptr + 1).to(tl.int32)


def is_foreseen(rises: Sequence[int], numel: int) -> bool:
    """Whether it pays: not where a tensor is small, whose passes are short."""
    return len(rises) > 0 and spread(numel)[1] > 1


COLUMNS = tl.constexpr(256)
"""Threads of a program, each of which has a column of its own."""
ROWS = tl.constexpr(8)
"""Of all columns, that are read at once."""


class Aside(NamedTuple):
    values: Tensor
    """Magnitudes, as bits: for each program, as many rows as there is room for."""
    held: Tensor
    """How many are in each column."""
    told: Tensor
    """Of each program: the sums of those beyond either bracket, and their numbers."""
    room: int


@triton.jit
def none_aside(state_ptr):
    """Sums and numbers beyond both brackets and what columns hold, all zero; and the brackets."""
    total, count = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.int32)
    low, middle = bracket_ahead(state_ptr, 0)
    high, end = bracket_ahead(state_ptr, 1)
    return (total, count, total, count, count), (low, middle, high, end)


@triton.jit
def put_aside(values_ptr, size, aside, brackets, ROOM: tl.constexpr):
    """Goes on with the finite magnitudes (bits) of a tile, if there is any room."""
    first, many, second, few, held = aside
    if ROOM:
        low, middle, high, end = brackets
        past, over = size >= middle, size >= end
        first, many = first + summed(tl.where(past, number(size), 0.0)), many + _count(past)
        second, few = second + summed(tl.where(over, number(size), 0.0)), few + _count(over)
        near = _between(size, low, middle) | _between(size, high, end)
        held = _write(values_ptr, size, near, held, ROOM)
    return first, many, second, few, held


@triton.jit
def _between(size, low, end):
    return (size - low).to(tl.uint32) < (end - low).to(tl.uint32)


@triton.jit
def _count(here):
    return summed(here.to(tl.int32))


@triton.jit
def _write(values_ptr, size, here, held, ROOM: tl.constexpr):
    """Writes what is here into the columns, behind what they hold; how many they hold then.

    No thread waits for another: each knows of its 4 by 4 entries how many come before.
    """
    LANES: tl.constexpr = size.shape[1]
    row, lane = tl.arange(0, 4)[:, None] * 8, tl.arange(0, 4)[None, :] * 8
    each, above = _prefixes(tl.sum(here.to(tl.int32) << row, axis=0))
    more, residual_out = _prefixes(tl.sum(tl.reshape(each, (COLUMNS, 4)) << lane, axis=1))
    before = tl.reshape(held[:, None] + ((residual_out[:, None] >> lane) & 0xFF), (LANES,))
    # Where there is no room left, it does not matter what is written over.
    spot = tl.minimum(before, ROOM - 4) * COLUMNS + tl.arange(0, LANES) // 4
    start_ptr = values_ptr + tl.program_id(0).to(tl.int64) * COLUMNS * ROOM
    at_ptr = (start_ptr + spot)[None, :] + ((above[None, :] >> row) & 0xFF) * COLUMNS
    # Not so, but told so the compiler leaves entries with the threads that have loaded them. What
    # a mask decides entry by entry is written one by one in any case.
    at_ptr = tl.max_contiguous(tl.multiple_of(at_ptr, [1, 16]), [1, 4])
    tl.store(at_ptr, size, mask=here)
    return held + more


@triton.jit
def _prefixes(packed):
    """Of four small numbers in the bytes of a word: their sum, and the sums before each."""
    upto = packed * 0x01010101
    return upto >> 24, upto - packed


@triton.jit
def tell_aside(told_ptr, helds_ptr, aside, ROOM: tl.constexpr):
    """Leaves what this program has found to later launches."""
    if ROOM:
        first, many, second, few, held = aside
        ptr, programs = told_ptr + tl.program_id(0), tl.num_programs(0)
        tl.store(ptr, tl.sum(first))
        tl.store(ptr + programs, tl.sum(second))
        tl.store(ptr + 2 * programs, tl.sum(many).to(tl.float64))
        tl.store(ptr + 3 * programs, tl.sum(few).to(tl.float64))
        tl.store(helds_ptr + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), held)


@triton.jit
def is_told(state_ptr, helds_ptr, program, bracket, border, ROOM: tl.constexpr):
    """Whether what a program has put aside tells what reaches a border (bits); counts if not."""
    first, end = bracket_ahead(state_ptr, bracket)
    held = tl.max(tl.load(helds_ptr + program * COLUMNS + tl.arange(0, COLUMNS)), 0)
    told = (first <= border) & (border <= end) & (held <= ROOM - 4)
    tl.atomic_add(state_ptr + AGAIN, tl.full((), 1, tl.int64), mask=~told, sem="relaxed")
    return told


@triton.jit
def summed_aside(
    values_ptr, helds_ptr, told_ptr, state_ptr, program, bracket, border, ROOM: tl.constexpr
):  # fmt: skip
    """Sum (float64) and number of a program's magnitudes that reach a border (bits)."""
    _, end = bracket_ahead(state_ptr, bracket)
    column = tl.arange(0, COLUMNS)
    held = tl.load(helds_ptr + program * COLUMNS + column)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    rest = tl.max(held, 0)
    while rest > 0:
        at = program.to(tl.int64) * COLUMNS * ROOM + row * COLUMNS + column[None, :]
        size = tl.load(values_ptr + at, mask=row < held[None, :], other=0)
        # Those from the end on are summed up already, and a border is above zero.
        here = (size >= border) & (size < end)
        total += tl.where(here, number(size), 0.0)
        count += here.to(tl.int32)
        row += ROWS
        rest -= ROWS
    ptr, programs = told_ptr + program, tl.num_programs(0)
    far, many = tl.load(ptr + bracket * programs), tl.load(ptr + (2 + bracket) * programs)
    return far + tl.sum(total), many.to(tl.int32) + tl.sum(count)


def new_aside(x: Tensor, rises: Sequence[int]) -> Aside:
    """Room for a tenth of the entries of each thread and 16; none where nothing is foreseen."""
    programs, tiles = spread(x.numel())
    foreseen = is_foreseen(rises, x.numel())
    columns = programs * COLUMNS.value if foreseen else 0
    room = tiles * TILE // COLUMNS.value // 10 + 16 if foreseen else 0
    values = torch.empty(columns * room, dtype=torch.int32, device=x.device)
    held = torch.empty(columns, dtype=torch.int32, device=x.device)
    told = torch.empty(4 if foreseen else 0, programs, dtype=torch.float64, device=x.device)
    return Aside(values, held, told, room)
