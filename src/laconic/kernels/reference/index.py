"""Ascending positions as a bitmap of blocks and packed low bits (the format: wire/indices.py)."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits, unpack_bits


def low_bits(numel: int, count: int) -> int:
    """Width of what is packed as it is: log2 of the mean gap, rounded down."""
    return max(0, (numel // max(1, count)).bit_length() - 1)


def bitmap_bits(numel: int, count: int) -> int:
    return count + (max(0, numel - 1) >> low_bits(numel, count)) + 1


def index_bytes(numel: int, count: int) -> int:
    """Bytes that `count` positions below `numel` take; fewer take at most one more."""
    return -(-bitmap_bits(numel, count) // 8) + -(-count * low_bits(numel, count) // 8)


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    """Bit (index >> low) + i of the bitmap for position number i, then the low bits."""
    place = (index >> low) + torch.arange(index.numel(), device=index.device)
    flags = torch.zeros(bitmap_bits, dtype=torch.int64, device=index.device)
    # An assignment would bring the 1 from the host, and wait for it.
    flags.index_fill_(0, place, 1)
    return torch.cat([pack_bits(flags, 1), pack_bits(index & ((1 << low) - 1), low)])


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    """The positions again; the bitmap has exactly `count` ones."""
    border = -(-bitmap_bits // 8)
    flags = unpack_bits(packed[:border], 1, bitmap_bits)
    # The size is given, so a GPU need not tell the host how many there are.
    place = torch.nonzero_static(flags, size=count).view(-1)
    high = place - torch.arange(count, device=packed.device)
    return (high << low) | unpack_bits(packed[border:], low, count)


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    """Whether the bytes tell exactly `count` positions, all below `numel` (a 0-d bool tensor)."""
    border = -(-bitmap_bits // 8)
    flags = unpack_bits(packed[:border], 1, border * 8)
    fits = (flags.sum() == count) & (flags[bitmap_bits:].sum() == 0)
    # With another number of ones the positions mean nothing, but computing them does no harm.
    return fits & (unpack_index(packed, low, bitmap_bits, count) < numel).all()
