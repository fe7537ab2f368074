"""Products with low-rank factors (definition: kernels/reference/low_rank.py).

Products are plain float32 multiply-adds: with so few columns memory bandwidth is the limit. Every
tile yields a partial product, and partial products are added in a fixed order, so the result is
deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.orthonormalize import MAX_RANK
from gradwire.kernels.reference import low_rank as reference

LARGE = 1 << 22
PROGRAMS = 1024
"""Programs that occupy a GPU; beyond that a program takes several tiles and yields fewer parts."""


class TileShape(NamedTuple):
    """Entries that a program holds at once, how many of them are in a row, and its warps.

    Wide tiles, so that a thread has whole columns of them. The fastest of seven on an H200.
    """

    entries: int
    max_cols: int
    warps: int

    def tiles(self, m: Tensor) -> tuple[int, int, int, int]:
        """Returns rows and columns of a tile, and the number of tiles in each direction."""
        rows, cols = m.shape
        width = min(self.max_cols, triton.next_power_of_2(cols))
        height = min(self.entries // width, triton.next_power_of_2(rows))
        return height, width, -(-rows // height), -(-cols // width)


PRODUCT = TileShape(8192, 512, 4)
TRANSPOSED = TileShape(8192, 1024, 8)
SUBTRACTED = TileShape(8192, 512, 8)
OUTER = TileShape(8192, 1024, 8)


@triton.jit
def _tile(row_block, col_block, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns the rows and columns of a tile, their flat indices (int64), and which are inside."""
    row = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = col_block.to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return row, col, row[:, None] * cols + col[None, :], inside


@triton.jit
def _load_total(
    x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK: tl.constexpr
):
    m = tl.load(x_ptr + index, mask=inside, other=0.0)
    if FEEDBACK:
        m += decay * tl.load(residual_ptr + index, mask=inside, other=0.0)
        tl.store(residual_out_ptr + index, m, mask=inside)
    return m


# Not `rows` and `cols`: multiples of 16 let a tile be read four entries at a time.
BLOCKS = ["col_blocks", "blocks"]


@triton.jit(do_not_specialize=BLOCKS)
def _product_kernel(
    x_ptr, residual_ptr, residual_out_ptr, base_ptr, parts_ptr, decay, rows, cols, col_blocks,
    col_step, k_step, FEEDBACK: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Computes the part of m @ base that one tile contributes."""
    block = tl.program_id(0)
    col_block = block % col_blocks
    row, col, index, inside = _tile(block // col_blocks, col_block, rows, cols, ROWS, COLS)
    m = _load_total(x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK)
    at = col_block.to(tl.int64) * rows + row
    for k in tl.static_range(RANK):
        weight = tl.load(base_ptr + col * col_step + k * k_step, mask=col < cols, other=0.0)
        part = tl.sum(m * weight[None, :], axis=1)
        tl.store(parts_ptr + at * RANK + k, part, mask=row < rows)


@triton.jit(do_not_specialize=BLOCKS)
def _transposed_product_kernel(
    x_ptr, residual_ptr, residual_out_ptr, base_ptr, parts_ptr, decay, rows, cols, col_blocks,
    blocks, FEEDBACK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Computes the part of mᵀ @ base that some tiles of a column contribute."""
    # From the end: what the previous pass wrote last is still in the cache.
    block = blocks - 1 - tl.program_id(0)
    group = block // col_blocks
    i = tl.arange(0, SIZE)
    sums = tl.zeros((SIZE, COLS), tl.float32)
    for step in range(STEPS):
        row_block = group * STEPS + STEPS - 1 - step
        row, _, index, inside = _tile(row_block, block % col_blocks, rows, cols, ROWS, COLS)
        m = _load_total(x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK)
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
    SUBTRACT: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row, col, index, inside = _tile(block // col_blocks, block % col_blocks, rows, cols, ROWS, COLS)
    product = tl.zeros((ROWS, COLS), tl.float32)
    if SUBTRACT:
        # Loaded first, since it takes longest.
        minuend = tl.load(out_ptr + index, mask=inside, other=0.0)
    for k in tl.static_range(RANK):
        p = tl.load(p_ptr + row * RANK + k, mask=row < rows, other=0.0)
        q = tl.load(q_ptr + col * col_step + k * k_step, mask=col < cols, other=0.0)
        product += p[:, None] * q[None, :]
    if SUBTRACT:
        product = minuend - product
    tl.store(out_ptr + index, product, mask=inside)


def _column_major(base: Tensor, m: Tensor) -> Tensor:
    """Returns `base` in column-major order if it is read often enough to repay the copy."""
    return base.T.contiguous().T if m.numel() > LARGE else base


def _factor(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, transposed: bool,
    feedback: bool,
) -> Tensor:  # fmt: skip
    (rows, cols), rank = x.shape, base.shape[1]
    shape = TRANSPOSED if transposed else PRODUCT
    height, width, row_blocks, col_blocks = shape.tiles(x)
    sizes = {"FEEDBACK": feedback, "RANK": rank, "ROWS": height, "COLS": width}
    if transposed:
        # A power of two, since every other value would be compiled anew.
        steps = min(32, triton.next_power_of_2(1 + row_blocks * col_blocks // PROGRAMS))
        groups = -(-row_blocks // steps)
        parts = x.new_empty(groups, cols, rank)
        _transposed_product_kernel[(groups * col_blocks,)](
            x, residual, residual_out, base, parts, decay, rows, cols, col_blocks,
            groups * col_blocks, SIZE=triton.next_power_of_2(rank), STEPS=steps,
            num_warps=shape.warps, **sizes,
        )  # fmt: skip
    else:
        base = _column_major(base, x)
        parts = x.new_empty(col_blocks, rows, rank)
        _product_kernel[(row_blocks * col_blocks,)](
            x, residual, residual_out, base, parts, decay, rows, cols, col_blocks, *base.stride(),
            num_warps=shape.warps, **sizes,
        )  # fmt: skip
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _is_supported(m: Tensor, base: Tensor) -> bool:
    """Returns whether the kernels support these sizes; torch multiplies wide or empty factors."""
    return m.numel() > 0 and 0 < base.shape[1] <= MAX_RANK


def factor(m: Tensor, base: Tensor, transposed: bool) -> Tensor:
    if not _is_supported(m, base):
        return reference.factor(m, base, transposed)
    return _factor(m, m, 0.0, m, base, transposed, feedback=False)


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, transposed: bool
) -> Tensor:
    if not _is_supported(x, base):
        return reference.factor_sum(x, residual, decay, residual_out, base, transposed)
    return _factor(x, residual, decay, residual_out, base, transposed, feedback=True)


def _outer(out: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
    shape = SUBTRACTED if subtract else OUTER
    height, width, row_blocks, col_blocks = shape.tiles(out)
    q = _column_major(q, out)
    _outer_kernel[(row_blocks * col_blocks,)](
        out, p, q, *out.shape, col_blocks, *q.stride(),
        SUBTRACT=subtract, RANK=p.shape[1], ROWS=height, COLS=width, num_warps=shape.warps,
    )  # fmt: skip


def subtract_low_rank(m: Tensor, p: Tensor, q: Tensor) -> None:
    if _is_supported(m, p):
        _outer(m, p, q, subtract=True)
    else:
        reference.subtract_low_rank(m, p, q)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    if _is_supported(out, p):
        _outer(out, p, q, subtract=False)
    else:
        reference.outer(out, p, q)
