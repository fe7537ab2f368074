"""Gather and scatter of selected entries (definition: kernels/reference/scatter.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled
from gradwire.kernels.cpu.packing import unpack_index
from gradwire.kernels.reference.scatter import rounded
from gradwire.kernels.validation import check_out


@compiled
def _add(
    out: NDArray[np.float32],
    index: NDArray[np.int64],
    rows: NDArray[np.float32],
    weight: np.float32,
) -> None:
    for i in range(index.size):
        total = out[index[i]]
        for row in range(rows.shape[0]):
            total += rows[row, i] * weight
        out[index[i]] = total


@compiled
def _gather(x: NDArray[np.float32], index: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    for i in range(index.size):
        out[i] = x[index[i]]


@compiled
def _scatter(x: NDArray[np.float32], index: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    for i in range(index.size):
        x[index[i]] = values[i]


def extract(residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    selected = torch.empty(index.numel())
    _gather(residual_out.numpy(), index.numpy(), selected.numpy())
    values = rounded(selected, dtype)
    _scatter(residual_out.numpy(), index.numpy(), (selected - values.to(selected.dtype)).numpy())
    return values


def add_at(out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None:
    check_out(out)
    _add(out.numpy(), index.numpy(), rows.to(out.dtype).numpy(), np.float32(weight))


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    check_out(out)
    total, factor = out.numpy(), np.float32(weight)
    for row, entries in zip(packed, values, strict=True):
        index = unpack_index(row, low, bitmap_bits, entries.numel())
        _add(total, index.numpy(), entries.unsqueeze(0).to(out.dtype).numpy(), factor)
