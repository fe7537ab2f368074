"""Tensors as the arrays that compiled loops want."""

from typing import Any

from numpy.typing import NDArray
from torch import Tensor


def flat_rows(rows: Tensor) -> tuple[NDArray[Any], int]:
    """All rows as one array without gaps, and how far a row begins after the one before it.

    Loops over an array whose layout is not known do not become vector instructions.
    """
    count, length = rows.shape
    distance = rows.stride(0)
    span = (count - 1) * distance + length if length else 0
    return rows.as_strided((span,), (1,)).numpy(), distance


def in_place(residual: Tensor, left: Tensor) -> NDArray[Any]:
    """`left`, holding the residual, whether it was that one or not."""
    if left.data_ptr() != residual.data_ptr():
        left.copy_(residual)
    return left.numpy()
