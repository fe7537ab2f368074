"""Codebook format: the bin number of every entry, and the mean of the entries in each bin."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import Field, Layout, Parts
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits


def bin_count(numel: int, bits: int) -> int:
    return 1 << bits if numel else 0


def bins_layout(numel: int, bits: int) -> Layout:
    codes = Field(torch.uint8, packed_numel(numel, bits))
    return Layout((codes, Field(torch.float32, bin_count(numel, bits))))


def pack_bins(x: Tensor, codes: Tensor, bits: int) -> Parts:
    """Packs flat `x`, whose entry i is in bin `codes[i]` (int64)."""
    # Summed in float64: rounding to float32 hides the order of additions on a GPU, and large
    # entries do not overflow.
    sums = x.new_zeros(bin_count(x.numel(), bits), dtype=torch.float64)
    sums.scatter_add_(0, codes, x.double())
    counts = torch.zeros_like(sums).scatter_add_(0, codes, torch.ones_like(x).double())
    return pack_bits(codes, bits), (sums / counts.clamp(min=1)).to(x.dtype)


def add_bins(out: Tensor, messages: Sequence[Parts], weight: float, bits: int) -> None:
    """Adds `weight` times the mean of its bin to each entry, message by message."""
    for codes, means in messages:
        out.add_((means * weight)[unpack_bits(codes, bits, out.numel())])
