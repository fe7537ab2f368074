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

from gradwire.kernels import reference
from gradwire.kernels.cpu.jit import compiled_sums
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference import orthonormal

__all__ = ["factor", "factor_sum", "lessen", "orthonormal", "outer"]

FEW = range(2, 9)
STRETCH = 1024

LINE = 16
"""Columns of a line of the cache, which two threads should not share."""


# Slices below, since only loops from 0 on are known to have no negative index.
@compiled_sums
def _along(m: NDArray[np.float32], base: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Adds m @ baseᵀ to `out`."""
    rows, cols = m.shape
    for start in range(0, cols, STRETCH):
        stop = min(cols, start + STRETCH)
        for i in range(rows):
            row = m[i, start:stop]
            for k in range(base.shape[0]):
                weight = base[k, start:stop]
                part = np.float32(0)
                for j in range(row.size):
                    part += row[j] * weight[j]
                out[i, k] += part


@compiled_sums
def _across(
    m: NDArray[np.float32],
    base: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """Adds baseᵀ @ m to columns of `out`, two rows for one reading of it."""
    rows = m.shape[0]
    for start in range(begin, end, STRETCH):
        stop = min(end, start + STRETCH)
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
def _spread(
    out: NDArray[np.float32], p: NDArray[np.float32], q: NDArray[np.float32], less: bool
) -> None:
    """Writes p @ q to `out`, or takes it away from there."""
    rows, cols = out.shape
    sign = np.float32(-1 if less else 1)
    for start in range(0, cols, STRETCH):
        stop = min(cols, start + STRETCH)
        for i in range(rows):
            row = out[i, start:stop]
            if not less:
                for j in range(row.size):
                    row[j] = 0
            for k in range(q.shape[0]):
                weight = sign * p[i, k]
                column = q[k, start:stop]
                for j in range(row.size):
                    row[j] += weight * column[j]


def _turned(base: Tensor) -> NDArray[np.float32]:
    return base.T.contiguous().numpy()


def _by_rows(loop: Callable[[slice], None], m: Tensor, rank: int) -> None:
    cols = max(1, m.shape[1])
    in_slices(lambda start, stop: loop(slice(start // cols, stop // cols)), m.numel(), cols, rank)


def _by_columns(loop: Callable[[int, int], None], m: Tensor, rank: int) -> None:
    rows = max(1, m.shape[0])
    unit = LINE * rows
    in_slices(lambda start, stop: loop(start // rows, stop // rows), m.numel(), unit, rank)


def factor(m: Tensor, base: Tensor, turned: bool) -> Tensor:
    rank = base.shape[1]
    if rank not in FEW:
        return reference.factor(m, base, turned)
    matrix = m.numpy()
    if turned:
        sums = torch.zeros(rank, m.shape[1])
        loop = partial(_across, matrix, base.contiguous().numpy(), sums.numpy())
        _by_columns(loop, m, rank)
        return sums.T.contiguous()
    out, base_rows = torch.zeros(m.shape[0], rank), _turned(base)
    sums_of = out.numpy()
    _by_rows(lambda rows: _along(matrix[rows], base_rows, sums_of[rows]), m, rank)
    return out


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, turned: bool
) -> Tensor:
    return factor(torch.add(x, residual, alpha=decay, out=residual_out), base, turned)


def _spread_over(out: Tensor, p: Tensor, q: Tensor, less: bool) -> None:
    matrix, residual_out, right = out.numpy(), p.contiguous().numpy(), _turned(q)
    _by_rows(lambda rows: _spread(matrix[rows], residual_out[rows], right, less), out, p.shape[1])


def lessen(m: Tensor, p: Tensor, q: Tensor) -> None:
    if p.shape[1] in FEW:
        _spread_over(m, p, q, True)
    else:
        reference.lessen(m, p, q)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    if p.shape[1] in FEW:
        _spread_over(out, p, q, False)
    else:
        reference.outer(out, p, q)
