"""Casts to another floating-point format (definition: kernels/reference/cast.py)."""

import torch
from torch import Tensor

from gradwire.kernels.reference import cast
from gradwire.kernels.reference.scatter import LARGEST_HALF


def cast_pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    # One pass instead of three if nothing saturates.
    if dtype == torch.float16 and x.numel() and _in_range(x):
        return x.to(dtype)
    return cast.cast_pack(x, dtype)


def cast_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, dtype: torch.dtype
) -> Tensor:
    return cast.sum_and_cast(cast_pack, x, residual, decay, residual_out, dtype)


def _in_range(x: Tensor) -> bool:
    low, high = x.aminmax()
    return bool(low >= -LARGEST_HALF) and bool(high <= LARGEST_HALF)
