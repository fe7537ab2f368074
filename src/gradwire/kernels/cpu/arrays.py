"""NumPy views of tensors, in the layout that compiled loops need."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.types import EFInput


def flat_rows(rows: Tensor) -> tuple[NDArray[Any], int]:
    """All rows as one array without gaps, and how far a row begins after the one before it.

    Loops over an array whose layout is not known do not become vector instructions.
    """
    count, length = rows.shape
    distance = rows.stride(0)
    span = (count - 1) * distance + length if length else 0
    return rows.as_strided((span,), (1,)).numpy(), distance


def memory_of(given: EFInput) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The residual and what is left: one array where they are one, empty where there is none."""
    if given.residual is None or given.residual_out is None:
        nothing = np.empty(0, dtype=np.float32)
        return nothing, nothing
    residual_out = given.residual_out.numpy()
    if given.residual_out.data_ptr() == given.residual.data_ptr():
        return residual_out, residual_out
    return given.residual.numpy(), residual_out
