"""Bit packing of fixed-width integers, and of ascending positions.

Value i takes bits i*width .. (i+1)*width of the byte stream. Positions are stored as a bitmap of
their high bits and packed low bits (Elias-Fano), or as a plain bitmap where that is shorter (the
format: wire/indices.py). `low` and `bitmap_bits` describe the format of a message; `low` is PLAIN
for a plain bitmap.
"""

from functools import lru_cache

import torch
from torch import Tensor

PLAIN = -1
"""In place of a number of low bits: a bitmap with one bit for every entry of the tensor."""


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Packs integers below 2^width into uint8; the first value of a byte has the lowest bits."""
    if width == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    # Eight values fill `width` whole bytes, so groups of eight are independent.
    groups = -(-values.numel() // 8)
    filled = torch.zeros(groups * 8, dtype=torch.int64, device=values.device)
    filled[: values.numel()] = values
    bits = (filled.view(-1, 1) >> torch.arange(width, device=values.device)) & 1
    weights = 1 << torch.arange(8, device=values.device)
    packed = (bits.view(groups * width, 8) * weights).sum(-1).to(torch.uint8)
    return packed[: -(-values.numel() * width // 8)]


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpacks the first `count` values, as int64."""
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    groups = -(-count // 8)
    filled = packed.new_zeros(groups * width)
    filled[: packed.numel()] = packed[: groups * width]
    bits = (filled.long().view(-1, 1) >> torch.arange(8, device=packed.device)) & 1
    weights = 1 << torch.arange(width, device=packed.device)
    return (bits.view(groups * 8, width) * weights).sum(-1)[:count]


def _elias_fano(numel: int, count: int) -> tuple[int, int]:
    """Returns low bits per position, floor(log2(mean gap)), and the bits in the bitmap."""
    low = max(0, (numel // max(1, count)).bit_length() - 1)
    return low, count + (max(0, numel - 1) >> low) + 1


# Cached, since most messages have a constant number of entries: the same few pairs recur.
@lru_cache(maxsize=4096)
def low_bits(numel: int, count: int) -> int:
    """Returns the number of low bits that are packed as they are, or PLAIN.

    Elias-Fano gives way to a plain bitmap where that has fewer bytes: more than a quarter of the
    entries, or a few of a short tensor.
    """
    low, bits = _elias_fano(numel, count)
    shorter = 0 < -(-numel // 8) < -(-bits // 8) + -(-count * low // 8)
    return PLAIN if shorter else low


@lru_cache(maxsize=4096)
def bitmap_bits(numel: int, count: int) -> int:
    """Returns the number of bits in the bitmap: of the high bits, or of all entries."""
    return numel if low_bits(numel, count) == PLAIN else _elias_fano(numel, count)[1]


@lru_cache(maxsize=4096)
def index_bytes(numel: int, count: int) -> int:
    """Returns the bytes of `count` packed positions below `numel`; fewer take at most one more."""
    return -(-bitmap_bits(numel, count) // 8) + -(-count * max(0, low_bits(numel, count)) // 8)


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    """Packs positions: bit (index >> low) + i of a bitmap for position number i, then low bits.

    A plain bitmap has bit `index` set for every position, and nothing else.
    """
    flags = torch.zeros(bitmap_bits, dtype=torch.int64, device=index.device)
    if low == PLAIN:
        return pack_bits(flags.index_fill_(0, index, 1), 1)
    place = (index >> low) + torch.arange(index.numel(), device=index.device)
    # An assignment would copy the 1 from the host, and synchronize.
    flags.index_fill_(0, place, 1)
    return torch.cat([pack_bits(flags, 1), pack_bits(index & ((1 << low) - 1), low)])


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    """Unpacks the positions; the bitmap has exactly `count` ones."""
    bitmap_bytes = -(-bitmap_bits // 8)
    flags = unpack_bits(packed[:bitmap_bytes], 1, bitmap_bits)
    # With a given size the host need not wait for a GPU to count them.
    place = torch.nonzero_static(flags, size=count).view(-1)
    if low == PLAIN:
        return place
    high = place - torch.arange(count, device=packed.device)
    return (high << low) | unpack_bits(packed[bitmap_bytes:], low, count)


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    """Returns whether the bytes hold exactly `count` positions below `numel` (0-d bool tensor)."""
    bitmap_bytes = -(-bitmap_bits // 8)
    flags = unpack_bits(packed[:bitmap_bytes], 1, bitmap_bytes * 8)
    fits = (flags.sum() == count) & (flags[bitmap_bits:].sum() == 0)
    if low == PLAIN:
        return fits
    # With another number of ones the positions are meaningless, but computing them is safe.
    return fits & (unpack_index(packed, low, bitmap_bits, count) < numel).all()
