"""Orthonormal columns in five small launches (definition: kernels/reference/low_rank.py).

Gram-Schmidt on coefficients: the Gram matrix of the columns, in float64, gives the combinations of
columns that are orthonormal. Where columns are nearly dependent that is inexact, so it is repeated
on the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import low_rank as reference

MAX_RANK = 16
"""Most columns that the low-rank kernels take; beyond that torch is as fast."""
ROWS = 128
PARTS = 4096
"""Numbers in all partial Gram matrices together, which one program adds up."""


@triton.jit
def _combined(
    p_ptr, coef_ptr, row, rows, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns these rows of p @ coef; a column of weight zero is ignored, even if it is NaN."""
    i = tl.arange(0, SIZE)
    out = tl.zeros((ROWS, SIZE), tl.float64)
    for k in range(RANK):
        column = tl.load(p_ptr + row * RANK + k, mask=row < rows, other=0.0).to(tl.float64)
        weight = tl.load(coef_ptr + k * RANK + i, mask=i < RANK, other=0.0)
        out += tl.where(weight[None, :] != 0, column[:, None] * weight[None, :], 0.0)
    return out


@triton.jit(do_not_specialize=["rows"])
def _gram_kernel(
    p_ptr, coef_ptr, parts_ptr, rows, rows_each,
    SECOND: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes a partial Gram matrix of p, or of p @ coef if SECOND."""
    i = tl.arange(0, SIZE)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    start = tl.program_id(0).to(tl.int64) * rows_each
    stop = start + rows_each
    # Triton's interpreter does not support range() up to an argument.
    while start < stop:
        row = start + tl.arange(0, ROWS)
        if SECOND:
            columns = _combined(p_ptr, coef_ptr, row, rows, RANK, SIZE, ROWS)
        else:
            inside = (row < rows)[:, None] & (i < RANK)[None, :]
            columns = tl.load(p_ptr + row[:, None] * RANK + i[None, :], mask=inside, other=0.0)
            columns = columns.to(tl.float64)
        for k in range(RANK):
            column = tl.sum(tl.where(i[None, :] == k, columns, 0.0), axis=1)
            products = tl.sum(columns * column[:, None], axis=0)
            gram += tl.where(i[:, None] == k, products[None, :], 0.0)
        start += ROWS
    at = tl.program_id(0) * RANK * RANK + i[:, None] * RANK + i[None, :]
    tl.store(parts_ptr + at, gram, mask=(i < RANK)[:, None] & (i < RANK)[None, :])


@triton.jit(do_not_specialize=["blocks"])
def _solve_kernel(
    parts_ptr, coef_ptr, blocks,
    SECOND: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Column j of coef: weights of p's columns that give the j-th orthonormal one, or zeros."""
    i = tl.arange(0, SIZE)
    b = tl.arange(0, BLOCKS)
    inside = (i < RANK)[:, None] & (i < RANK)[None, :]
    index = i[:, None] * RANK + i[None, :]
    at = b[:, None, None] * RANK * RANK + index[None, :, :]
    valid = inside[None, :, :] & (b < blocks)[:, None, None]
    gram = tl.sum(tl.load(parts_ptr + at, mask=valid, other=0.0), axis=0)
    diagonal = tl.where(i[:, None] == i[None, :], gram, 0.0)
    # Comparisons with NaN are false: such columns count as zero.
    row_finite = tl.sum(diagonal, axis=1) < float("inf")
    col_finite = tl.sum(diagonal, axis=0) < float("inf")
    gram = tl.where(row_finite[:, None] & col_finite[None, :], gram, 0.0)
    coef = tl.zeros((SIZE, SIZE), tl.float64)
    for j in range(RANK):
        gram_j = tl.sum(tl.where(i[None, :] == j, gram, 0.0), axis=1)
        projection = tl.sum(coef * gram_j[:, None], axis=0)
        rest = tl.where(i == j, 1.0, 0.0) - tl.sum(coef * projection[None, :], axis=1)
        rest_sq = tl.sum(rest * tl.sum(gram * rest[None, :], axis=1))
        norm_sq = tl.sum(tl.where(i == j, gram_j, 0.0))
        unit = tl.where(rest_sq > 1e-10 * norm_sq, rest / tl.sqrt(rest_sq), 0.0)
        coef = tl.where(i[None, :] == j, unit[:, None], coef)
    if SECOND:
        # The second round applies to the result of the first: combine both.
        first = tl.load(coef_ptr + index, mask=inside, other=0.0)
        combined = tl.zeros((SIZE, SIZE), tl.float64)
        for k in range(RANK):
            column = tl.sum(tl.where(i[None, :] == k, first, 0.0), axis=1)
            weight = tl.sum(tl.where(i[:, None] == k, coef, 0.0), axis=0)
            combined += column[:, None] * weight[None, :]
        coef = combined
        # All threads must have read the old coefficients before any writes.
        tl.debug_barrier()
    tl.store(coef_ptr + index, coef, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _unit_kernel(
    p_ptr, coef_ptr, out_ptr, rows, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, SIZE)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit = _combined(p_ptr, coef_ptr, row, rows, RANK, SIZE, ROWS).to(tl.float32)
    inside = (row < rows)[:, None] & (i < RANK)[None, :]
    tl.store(out_ptr + row[:, None] * RANK + i[None, :], unit, mask=inside)


def orthonormal(p: Tensor) -> Tensor:
    rows, rank = p.shape
    if not 0 < rank <= MAX_RANK or not rows:
        return reference.orthonormal(p)
    size = triton.next_power_of_2(rank)
    max_blocks = min(64, PARTS // size**2)
    rows_each = ROWS * -(-rows // (ROWS * max_blocks))
    blocks = -(-rows // rows_each)
    parts = torch.empty(blocks, rank, rank, dtype=torch.float64, device=p.device)
    coef = torch.empty(rank, rank, dtype=torch.float64, device=p.device)
    out = torch.empty_like(p)
    sizes = {"RANK": rank, "SIZE": size}
    # A single column is exact after one round.
    for second in (False, True)[: 1 + (rank > 1)]:
        _gram_kernel[(blocks,)](p, coef, parts, rows, rows_each, SECOND=second, ROWS=ROWS, **sizes)
        _solve_kernel[(1,)](parts, coef, blocks, SECOND=second, BLOCKS=max_blocks, **sizes)
    _unit_kernel[(-(-rows // ROWS),)](p, coef, out, rows, ROWS=ROWS, **sizes)
    return out
