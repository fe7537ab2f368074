"""Casts of tensors to another floating-point format, and the sum of such messages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.reference.scatter import rounded


def cast_pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in another format, or itself if that is its own; float16 saturates."""
    return rounded(x, dtype)


def cast_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, dtype: torch.dtype
) -> Tensor:
    """Casts x + decay * residual; `residual_out` then holds the rounding error."""
    return sum_and_cast(cast_pack, x, residual, decay, residual_out, dtype)


def sum_and_cast(
    cast: Callable[[Tensor, torch.dtype], Tensor],
    x: Tensor,
    residual: Tensor,
    decay: float,
    residual_out: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes `cast_pack_sum` with any cast function."""
    total = torch.add(x, residual, alpha=decay, out=residual_out)
    values = cast(total, dtype)
    if values is total:
        values = total.clone()
    residual_out.sub_(values.to(residual_out.dtype))
    return values


def cast_add(out: Tensor, rows: Sequence[Tensor], weight: float) -> None:
    """Adds `weight` times each row of numbers, in order."""
    for row in rows:
        # Adding numbers of another type directly is several times slower.
        out.add_(row.to(out.dtype), alpha=weight)
