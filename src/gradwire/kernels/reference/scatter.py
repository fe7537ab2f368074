"""Gather and scatter of selected entries: extraction with rounding, and weighted addition."""

import torch
from torch import Tensor

from gradwire.kernels.reference.packing import unpack_index

LARGEST_HALF = torch.finfo(torch.float16).max


def extract(residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the entries at `index`, rounded to `dtype`; the rounding error replaces them."""
    selected = residual_out[index]
    values = rounded(selected, dtype)
    residual_out.index_copy_(0, index, selected - values.to(residual_out.dtype))
    return values


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts `x`; finite entries beyond the range of float16 become its largest number."""
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
    """Adds `weight` times each row of values at the positions in that row of bytes, in order.

    The bytes are those of `pack_index`.
    """
    for row, entries in zip(packed, values, strict=True):
        index = unpack_index(row, low, bitmap_bits, entries.numel())
        add_at(out, index, entries.unsqueeze(0), weight)
