"""Products with thin factors (definition: kernels/reference/low_rank.py).

torch multiplies by one column, or by many, at memory speed, but by a few at a tenth of it. These
loops process a block of columns at a time, so that its part of the factor stays in the cache.
Adding the residual beforehand, by torch, costs no more than adding it inside the loop.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled_sums
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference import low_rank as reference

FEW = range(2, 9)
"""Ranks at which these loops are faster than torch."""
CHUNK = 1024
"""Columns that are processed at a time."""

LINE = 16
"""Columns of a cache line, which two threads should not share."""


# Loops run over slices from 0 on, since Numba then knows that no index is negative.
@compiled_sums
def _multiply_rows(
    m: NDArray[np.float32], base: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Adds m @ baseᵀ to `out`."""
    rows, cols = m.shape
    for start in range(0, cols, CHUNK):
        stop = min(cols, start + CHUNK)
        for i in range(rows):
            row = m[i, start:stop]
            for k in range(base.shape[0]):
                weight = base[k, start:stop]
                part = np.float32(0)
                for j in range(row.size):
                    part += row[j] * weight[j]
                out[i, k] += part


@compiled_sums
def _multiply_columns(
    m: NDArray[np.float32],
    base: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """Adds baseᵀ @ m to columns of `out`, two rows per pass over it."""
    rows = m.shape[0]
    for start in range(begin, end, CHUNK):
        stop = min(end, start + CHUNK)
        for i in range(0, rows - 1, 2):
            above, below = m[i, start:stop], m[i + 1, start:stop]
            for k in range(base.shape[1]):
                sums = out[k, start:stop]
                first, second = base[i, k], base[i + 1, k]
                for j in range(sums.size):
                    sums[j] += first * above[j] + second * below[j]
        if rows % 2:
            last = m[rows - 1, start:stop]
            for k in range(base.shape[1]):
                sums = out[k, start:stop]
                for j in range(sums.size):
                    sums[j] += base[rows - 1, k] * last[j]


@compiled_sums
def _outer(
    out: NDArray[np.float32], p: NDArray[np.float32], q: NDArray[np.float32], subtract: bool
) -> None:
    """Writes p @ q to `out`, or subtracts it from `out`."""
    rows, cols = out.shape
    sign = np.float32(-1 if subtract else 1)
    for start in range(0, cols, CHUNK):
        stop = min(cols, start + CHUNK)
        for i in range(rows):
            row = out[i, start:stop]
            if not subtract:
                for j in range(row.size):
                    row[j] = 0
            for k in range(q.shape[0]):
                weight = sign * p[i, k]
                column = q[k, start:stop]
                for j in range(row.size):
                    row[j] += weight * column[j]


def _transposed(base: Tensor) -> NDArray[np.float32]:
    return base.T.contiguous().numpy()


def _by_rows(loop: Callable[[slice], None], m: Tensor, rank: int) -> None:
    cols = max(1, m.shape[1])
    in_slices(lambda start, stop: loop(slice(start // cols, stop // cols)), m.numel(), cols, rank)


def _by_columns(loop: Callable[[int, int], None], m: Tensor, rank: int) -> None:
    rows = max(1, m.shape[0])
    unit = LINE * rows
    in_slices(lambda start, stop: loop(start // rows, stop // rows), m.numel(), unit, rank)


def factor(m: Tensor, base: Tensor, transposed: bool) -> Tensor:
    rank = base.shape[1]
    if rank not in FEW:
        return reference.factor(m, base, transposed)
    matrix = m.numpy()
    if transposed:
        sums = torch.zeros(rank, m.shape[1])
        loop = partial(_multiply_columns, matrix, base.contiguous().numpy(), sums.numpy())
        _by_columns(loop, m, rank)
        return sums.T.contiguous()
    out, base_rows = torch.zeros(m.shape[0], rank), _transposed(base)
    sums_of = out.numpy()
    _by_rows(lambda rows: _multiply_rows(matrix[rows], base_rows, sums_of[rows]), m, rank)
    return out


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, transposed: bool
) -> Tensor:
    return factor(torch.add(x, residual, alpha=decay, out=residual_out), base, transposed)


def _write_outer(out: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
    matrix, left, right = out.numpy(), p.contiguous().numpy(), _transposed(q)
    _by_rows(lambda rows: _outer(matrix[rows], left[rows], right, subtract), out, p.shape[1])


def subtract_low_rank(m: Tensor, p: Tensor, q: Tensor) -> None:
    if p.shape[1] in FEW:
        _write_outer(m, p, q, True)
    else:
        reference.subtract_low_rank(m, p, q)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    if p.shape[1] in FEW:
        _write_outer(out, p, q, False)
    else:
        reference.outer(out, p, q)
