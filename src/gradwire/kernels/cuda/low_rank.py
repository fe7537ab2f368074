"""Products with thin factors (definition: kernels/reference/low_rank.py).

Products are plain float32 multiply-adds: with so few columns memory bandwidth is the limit. Every
tile yields a partial product, and partial products are added in a fixed order, so the result is
deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import reference
from gradwire.kernels.cuda.orthonormalize import WIDEST

LARGE = 1 << 22
PROGRAMS = 1024
"""Enough to keep a card busy; beyond, a program takes several tiles and leaves fewer parts."""


class Form(NamedTuple):
    """Entries that a program holds at once, how many of a row are among them, and its warps.

    Wide tiles, so that a thread has whole columns of them. The fastest of seven on an H200.
    """

    tile: int
    wide: int
    warps: int

    def tiles(self, m: Tensor) -> tuple[int, int, int, int]:
        """Rows and columns of a tile, and how many tiles lie below and beside each other."""
        rows, cols = m.shape
        width = min(self.wide, triton.next_power_of_2(cols))
        height = min(self.tile // width, triton.next_power_of_2(rows))
        return height, width, -(-rows // height), -(-cols // width)


ALONG = Form(8192, 512, 4)
ACROSS = Form(8192, 1024, 8)
LESSEN = Form(8192, 512, 8)
OUTER = Form(8192, 1024, 8)


@triton.jit
def _tile(row_block, col_block, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The rows and columns of one tile, and where it lies in a matrix that may be huge."""
    row = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = col_block.to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return row, col, row[:, None] * cols + col[None, :], inside


@triton.jit
def _total(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK: tl.constexpr):
    m = tl.load(x_ptr + place, mask=inside, other=0.0)
    if FEEDBACK:
        m += decay * tl.load(residual_ptr + place, mask=inside, other=0.0)
        tl.store(left_ptr + place, m, mask=inside)
    return m


# Not `rows` and `cols`: multiples of 16 let a tile be read four entries at a time.
BLOCKS = ["col_blocks", "blocks"]


@triton.jit(do_not_specialize=BLOCKS)
def _along_kernel(
    x_ptr, residual_ptr, left_ptr, base_ptr, parts_ptr, decay, rows, cols, col_blocks,
    col_step, k_step, FEEDBACK: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """A part of m @ base from each tile."""
    block = tl.program_id(0)
    col_block = block % col_blocks
    row, col, place, inside = _tile(block // col_blocks, col_block, rows, cols, ROWS, COLS)
    m = _total(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK)
    at = col_block.to(tl.int64) * rows + row
    for k in tl.static_range(RANK):
        weight = tl.load(base_ptr + col * col_step + k * k_step, mask=col < cols, other=0.0)
        part = tl.sum(m * weight[None, :], axis=1)
        tl.store(parts_ptr + at * RANK + k, part, mask=row < rows)


@triton.jit(do_not_specialize=BLOCKS)
def _across_kernel(
    x_ptr, residual_ptr, left_ptr, base_ptr, parts_ptr, decay, rows, cols, col_blocks, blocks,
    FEEDBACK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A part of mᵀ @ base from some tiles below each other."""
    # From the end: what the pass before has written last is still in the cache.
    block = blocks - 1 - tl.program_id(0)
    group = block // col_blocks
    i = tl.arange(0, SIZE)
    sums = tl.zeros((SIZE, COLS), tl.float32)
    for step in range(STEPS):
        row_block = group * STEPS + STEPS - 1 - step
        row, _, place, inside = _tile(row_block, block % col_blocks, rows, cols, ROWS, COLS)
        m = _total(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK)
        for k in tl.static_range(RANK):
            weight = tl.load(base_ptr + row * RANK + k, mask=row < rows, other=0.0)
            part = tl.sum(m * weight[:, None], axis=0)
            sums += tl.where(i[:, None] == k, part[None, :], 0.0)
    col = (block % col_blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    at = (group.to(tl.int64) * cols + col)[None, :] * RANK + i[:, None]
    tl.store(parts_ptr + at, sums, mask=(i < RANK)[:, None] & (col < cols)[None, :])


@triton.jit(do_not_specialize=BLOCKS)
def _outer_kernel(
    out_ptr, p_ptr, q_ptr, rows, cols, col_blocks, col_step, k_step,
    LESS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row, col, place, inside = _tile(block // col_blocks, block % col_blocks, rows, cols, ROWS, COLS)
    said = tl.zeros((ROWS, COLS), tl.float32)
    if LESS:
        # First, since it takes the longest to come.
        m = tl.load(out_ptr + place, mask=inside, other=0.0)
    for k in tl.static_range(RANK):
        p = tl.load(p_ptr + row * RANK + k, mask=row < rows, other=0.0)
        q = tl.load(q_ptr + col * col_step + k * k_step, mask=col < cols, other=0.0)
        said += p[:, None] * q[None, :]
    if LESS:
        said = m - said
    tl.store(out_ptr + place, said, mask=inside)


def _lying(base: Tensor, m: Tensor) -> Tensor:
    """The same with its columns one after the other, where reading them many times repays it."""
    return base.T.contiguous().T if m.numel() > LARGE else base


def _factor(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, turned: bool,
    feedback: bool,
) -> Tensor:  # fmt: skip
    (rows, cols), rank = x.shape, base.shape[1]
    form = ACROSS if turned else ALONG
    height, width, below, beside = form.tiles(x)
    fixed = {"FEEDBACK": feedback, "RANK": rank, "ROWS": height, "COLS": width}
    if turned:
        # A power of two, since every other number is compiled anew.
        steps = min(32, triton.next_power_of_2(1 + below * beside // PROGRAMS))
        groups = -(-below // steps)
        parts = x.new_empty(groups, cols, rank)
        _across_kernel[(groups * beside,)](
            x, residual, residual_out, base, parts, decay, rows, cols, beside, groups * beside,
            SIZE=triton.next_power_of_2(rank), STEPS=steps, num_warps=form.warps, **fixed,
        )  # fmt: skip
    else:
        base = _lying(base, x)
        parts = x.new_empty(beside, rows, rank)
        _along_kernel[(below * beside,)](
            x, residual, residual_out, base, parts, decay, rows, cols, beside, *base.stride(),
            num_warps=form.warps, **fixed,
        )  # fmt: skip
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _thin(m: Tensor, base: Tensor) -> bool:
    """Whether these kernels are for it; torch multiplies with wide factors, or none."""
    return m.numel() > 0 and 0 < base.shape[1] <= WIDEST


def factor(m: Tensor, base: Tensor, turned: bool) -> Tensor:
    if not _thin(m, base):
        return reference.factor(m, base, turned)
    return _factor(m, m, 0.0, m, base, turned, feedback=False)


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, turned: bool
) -> Tensor:
    if not _thin(x, base):
        return reference.factor_sum(x, residual, decay, residual_out, base, turned)
    return _factor(x, residual, decay, residual_out, base, turned, feedback=True)


def _outer(out: Tensor, p: Tensor, q: Tensor, less: bool) -> None:
    form = LESSEN if less else OUTER
    height, width, below, beside = form.tiles(out)
    q = _lying(q, out)
    _outer_kernel[(below * beside,)](
        out, p, q, *out.shape, beside, *q.stride(),
        LESS=less, RANK=p.shape[1], ROWS=height, COLS=width, num_warps=form.warps,
    )  # fmt: skip


def lessen(m: Tensor, p: Tensor, q: Tensor) -> None:
    if _thin(m, p):
        _outer(m, p, q, less=True)
    else:
        reference.lessen(m, p, q)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    if _thin(out, p):
        _outer(out, p, q, less=False)
    else:
        reference.outer(out, p, q)
