"""Gather and scatter of selected entries: extraction with rounding, and weighted addition."""

import torch
from torch import Tensor

from gradwire.kernels.reference.packing import unpack_index

LARGEST_HALF = torch.finfo(torch.float16).max


def lift(residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries at `index`, rounded to `dtype`; what the rounding lost stays in their places."""
    chosen = residual_out[index]
    values = rounded(chosen, dtype)
    residual_out.index_copy_(0, index, chosen - values.to(residual_out.dtype))
    return values


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another format; finite entries beyond float16 become its largest number."""
    if dtype == torch.float16:
        x = torch.where(x.isinf(), x, x.clamp(-LARGEST_HALF, LARGEST_HALF))
    return x.to(dtype)


def add_at(out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None:
    """Adds `weight` times each row of values at the same (distinct) positions, in order."""
    total = out[index]
    for row in rows:
        total += row.to(out.dtype) * weight
    out.index_copy_(0, index, total)


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    """Adds `weight` times each row of values, in order, where that row of bytes tells.

    The bytes are `pack_index`'s.
    """
    for row, said in zip(packed, values, strict=True):
        index = unpack_index(row, low, bitmap_bits, said.numel())
        add_at(out, index, said.unsqueeze(0), weight)
