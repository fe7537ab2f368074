"""NumPy views of tensors, in the layout that compiled loops need."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.types import EFInput


def flat_rows(rows: Tensor) -> tuple[NDArray[Any], int]:
    """Returns all rows as one contiguous array, and the distance from one row to the next.

    Loops over arrays of unknown layout are not vectorized.
    """
    count, length = rows.shape
    distance = rows.stride(0)
    span = (count - 1) * distance + length if length else 0
    return rows.as_strided((span,), (1,)).numpy(), distance


def residual_arrays(ef: EFInput) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the arrays of `residual` and `residual_out`: one object if they share memory.

    Both are empty if there is no residual.
    """
    if ef.residual is None or ef.residual_out is None:
        nothing = np.empty(0, dtype=np.float32)
        return nothing, nothing
    residual_out = ef.residual_out.numpy()
    if ef.residual_out.data_ptr() == ef.residual.data_ptr():
        return residual_out, residual_out
    return ef.residual.numpy(), residual_out
