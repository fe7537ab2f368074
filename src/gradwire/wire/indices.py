"""Ascending positions in about 2 + log2(n/k) bits each (Elias 1974, Fano 1971), or as a bitmap.

A position is split at `low_bits(n, k)`. Its high bits, the number of a block of 2^low entries, are
encoded in a bitmap: position number i in block b sets bit b + i, so a block is a run of ones closed
by a zero. Its low bits, the offset in the block, are packed as they are, after the bitmap. The
length depends on n and k alone; at ratios of 10 %, 1 % and 0.1 % it is 12, 6 and 5 % above the
entropy. Where that takes more bytes than a bitmap with one bit per entry, at ratios above 25 %, the
bitmap is sent instead: the format, too, depends on n and k alone.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import WireError
from gradwire.kernels.reference.packing import bitmap_bits, index_bytes, low_bits
from gradwire.types import Field

__all__ = [
    "add_packed",
    "bitmap_bits",
    "check_index",
    "index_bytes",
    "index_field",
    "low_bits",
    "pack_index",
    "unpack_index",
]


def index_field(numel: int, count: int) -> Field:
    """Returns the field of `count` packed positions below `numel`."""
    return Field(torch.uint8, index_bytes(numel, count))


def pack_index(index: Tensor, numel: int) -> Tensor:
    """Packs positions (int64, ascending, below `numel`) into bytes."""
    count = index.numel()
    low = low_bits(numel, count)
    return kernels.on(index.device).pack_index(index, low, bitmap_bits(numel, count))


def unpack_index(packed: Tensor, numel: int, count: int) -> Tensor:
    """Unpacks positions from bytes that `check_index` has accepted."""
    low = low_bits(numel, count)
    return kernels.on(packed.device).unpack_index(packed, low, bitmap_bits(numel, count), count)


def add_packed(out: Tensor, packed: Tensor, values: Tensor, weight: float) -> None:
    """Adds `weight` times each row of values at the positions in that row of checked bytes."""
    numel, count = out.numel(), values.shape[1]
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    kernels.on(out.device).add_packed(out, packed, low, bits, values, weight)


def check_index(packed: Tensor, numel: int, count: int) -> None:
    """Raises WireError unless the bytes hold exactly `count` positions, all below `numel`."""
    low = low_bits(numel, count)
    fits = kernels.on(packed.device).index_fits(
        packed, low, bitmap_bits(numel, count), count, numel
    )
    if packed.is_cuda:
        # The host does not wait for the GPU; an invalid message raises on the device instead.
        torch._assert_async(fits, "gradwire: a message holds positions out of range")
    elif not fits:
        raise WireError(f"message does not hold {count} positions of a tensor of {numel}")
