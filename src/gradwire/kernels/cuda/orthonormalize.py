"""Orthonormal columns in five small launches (definition: kernels/reference/low_rank.py).

Gram-Schmidt on coefficients: the Gram matrix of the columns, in float64, gives the combinations of
columns that are orthonormal. Where columns are nearly dependent that is inexact, so it is repeated
on the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import reference

WIDEST = 16
"""Columns that the kernels of thin factors take; beyond them torch is as good."""
ROWS = 128
PARTS = 4096
"""Numbers in all partial Gram matrices together, which one program adds up."""


@triton.jit
def _combined(
    p_ptr, made_ptr, row, rows, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """These rows of p @ made; a column without weight does not count, even if it is no number."""
    i = tl.arange(0, SIZE)
    out = tl.zeros((ROWS, SIZE), tl.float64)
    for k in range(RANK):
        column = tl.load(p_ptr + row * RANK + k, mask=row < rows, other=0.0).to(tl.float64)
        weight = tl.load(made_ptr + k * RANK + i, mask=i < RANK, other=0.0)
        out += tl.where(weight[None, :] != 0, column[:, None] * weight[None, :], 0.0)
    return out


@triton.jit(do_not_specialize=["rows"])
def _gram_kernel(
    p_ptr, made_ptr, parts_ptr, rows, share,
    AGAIN: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A part of the Gram matrix of p, or of p @ made."""
    i = tl.arange(0, SIZE)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    start = tl.program_id(0).to(tl.int64) * share
    stop = start + share
    # Triton's interpreter has no range() up to an argument.
    while start < stop:
        row = start + tl.arange(0, ROWS)
        if AGAIN:
            columns = _combined(p_ptr, made_ptr, row, rows, RANK, SIZE, ROWS)
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
    parts_ptr, made_ptr, blocks,
    AGAIN: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Column j becomes how much of every column makes the j-th orthonormal one, or zeros."""
    i = tl.arange(0, SIZE)
    b = tl.arange(0, BLOCKS)
    inside = (i < RANK)[:, None] & (i < RANK)[None, :]
    place = i[:, None] * RANK + i[None, :]
    at = b[:, None, None] * RANK * RANK + place[None, :, :]
    all_ = inside[None, :, :] & (b < blocks)[:, None, None]
    gram = tl.sum(tl.load(parts_ptr + at, mask=all_, other=0.0), axis=0)
    diagonal = tl.where(i[:, None] == i[None, :], gram, 0.0)
    # No comparison holds for NaN: such columns count as zero.
    down = tl.sum(diagonal, axis=1) < float("inf")
    beside = tl.sum(diagonal, axis=0) < float("inf")
    gram = tl.where(down[:, None] & beside[None, :], gram, 0.0)
    made = tl.zeros((SIZE, SIZE), tl.float64)
    for j in range(RANK):
        with_j = tl.sum(tl.where(i[None, :] == j, gram, 0.0), axis=1)
        along = tl.sum(made * with_j[:, None], axis=0)
        rest = tl.where(i == j, 1.0, 0.0) - tl.sum(made * along[None, :], axis=1)
        residual_out = tl.sum(rest * tl.sum(gram * rest[None, :], axis=1))
        size = tl.sum(tl.where(i == j, with_j, 0.0))
        unit = tl.where(residual_out > 1e-10 * size, rest / tl.sqrt(residual_out), 0.0)
        made = tl.where(i[None, :] == j, unit[:, None], made)
    if AGAIN:
        # The second time for the result of the first: both steps in one.
        before = tl.load(made_ptr + place, mask=inside, other=0.0)
        both = tl.zeros((SIZE, SIZE), tl.float64)
        for k in range(RANK):
            column = tl.sum(tl.where(i[None, :] == k, before, 0.0), axis=1)
            weight = tl.sum(tl.where(i[:, None] == k, made, 0.0), axis=0)
            both += column[:, None] * weight[None, :]
        made = both
        # All threads have read what was there before any writes.
        tl.debug_barrier()
    tl.store(made_ptr + place, made, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _unit_kernel(
    p_ptr, made_ptr, out_ptr, rows, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, SIZE)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit = _combined(p_ptr, made_ptr, row, rows, RANK, SIZE, ROWS).to(tl.float32)
    inside = (row < rows)[:, None] & (i < RANK)[None, :]
    tl.store(out_ptr + row[:, None] * RANK + i[None, :], unit, mask=inside)


def orthonormal(p: Tensor) -> Tensor:
    rows, rank = p.shape
    if not 0 < rank <= WIDEST or not rows:
        return reference.orthonormal(p)
    size = triton.next_power_of_2(rank)
    most = min(64, PARTS // size**2)
    share = ROWS * -(-rows // (ROWS * most))
    blocks = -(-rows // share)
    parts = torch.empty(blocks, rank, rank, dtype=torch.float64, device=p.device)
    made = torch.empty(rank, rank, dtype=torch.float64, device=p.device)
    out = torch.empty_like(p)
    form = {"RANK": rank, "SIZE": size}
    # One column alone is exact at once.
    for again in (False, True)[: 1 + (rank > 1)]:
        _gram_kernel[(blocks,)](p, made, parts, rows, share, AGAIN=again, ROWS=ROWS, **form)
        _solve_kernel[(1,)](parts, made, blocks, AGAIN=again, BLOCKS=most, **form)
    _unit_kernel[(-(-rows // ROWS),)](p, made, out, rows, ROWS=ROWS, **form)
    return out
