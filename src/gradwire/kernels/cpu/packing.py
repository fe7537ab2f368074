"""Bit packing of integers, codes and positions (definition: kernels/reference/packing.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled
from gradwire.kernels.reference.packing import PLAIN


@compiled
def _pack(values: NDArray[np.int64], width: int, out: NDArray[np.uint8]) -> None:
    buffer, bits, place = np.uint64(0), 0, 0
    for i in range(values.size):
        buffer |= np.uint64(values[i]) << np.uint64(bits)
        bits += width
        while bits >= 8:
            out[place] = np.uint8(buffer & np.uint64(255))
            buffer >>= np.uint64(8)
            bits -= 8
            place += 1
    if bits:
        out[place] = np.uint8(buffer & np.uint64(255))


@compiled
def _unpack(packed: NDArray[np.uint8], width: int, out: NDArray[np.int64]) -> None:
    mask = np.uint64((1 << width) - 1)
    buffer, bits, place = np.uint64(0), 0, 0
    for i in range(out.size):
        while bits < width:
            buffer |= np.uint64(packed[place]) << np.uint64(bits)
            bits += 8
            place += 1
        out[i] = np.int64(buffer & mask)
        buffer >>= np.uint64(width)
        bits -= width


def pack_bits(values: Tensor, width: int) -> Tensor:
    out = torch.empty(-(-values.numel() * width // 8), dtype=torch.uint8)
    if out.numel():
        _pack(values.to(torch.int64).numpy(), width, out.numpy())
    return out


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 0:
        return torch.zeros(count, dtype=torch.int64)
    out = torch.empty(count, dtype=torch.int64)
    assert packed.numel() * 8 >= count * width
    _unpack(packed.numpy(), width, out.numpy())
    return out


Bytes = NDArray[np.uint8]


@compiled
def pack_codes(codes: Bytes, out: Bytes, first: int, width: int) -> None:
    """Writes codes from bit `first` on; unless they fill whole bytes, the stream must be zero."""
    if width == 8:
        target = out[first // 8 : first // 8 + codes.size]
        for i in range(codes.size):
            target[i] = codes[i]
    elif width == 4 and first % 8 == 0:
        half = codes.size // 2
        target = out[first // 8 : first // 8 + half]
        for i in range(half):
            target[i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))
        if codes.size % 2:
            out[first // 8 + half] = codes[codes.size - 1]
    else:
        for i in range(codes.size):
            place, shift = (first + i * width) // 8, (first + i * width) % 8
            out[place] |= np.uint8(codes[i] << np.uint8(shift))
            if shift + width > 8:
                out[place + 1] |= np.uint8(codes[i] >> np.uint8(8 - shift))


@compiled
def unpack_codes(packed: Bytes, first: int, width: int, codes: Bytes) -> None:
    """Reads the codes that begin at bit `first` of the stream."""
    if width == 8:
        source = packed[first // 8 : first // 8 + codes.size]
        for i in range(codes.size):
            codes[i] = source[i]
    elif width == 4 and first % 8 == 0:
        half = codes.size // 2
        source = packed[first // 8 : first // 8 + half]
        for i in range(half):
            codes[2 * i] = source[i] & np.uint8(15)
            codes[2 * i + 1] = source[i] >> np.uint8(4)
        if codes.size % 2:
            codes[codes.size - 1] = packed[first // 8 + half] & np.uint8(15)
    else:
        mask = np.uint32((1 << width) - 1)
        for i in range(codes.size):
            place, shift = (first + i * width) // 8, (first + i * width) % 8
            pair = np.uint32(packed[place])
            if shift + width > 8:
                pair |= np.uint32(packed[place + 1]) << np.uint32(8)
            codes[i] = np.uint8((pair >> np.uint32(shift)) & mask)


@compiled
def _mark(index: NDArray[np.int64], low: int, plain: bool, bitmap: NDArray[np.uint8]) -> None:
    for i in range(index.size):
        place = (index[i] >> low) + (0 if plain else i)
        bitmap[place >> 3] |= np.uint8(1 << (place & 7))


@compiled
def _blocks(
    bitmap: NDArray[np.uint8],
    low: int,
    plain: bool,
    bits: NDArray[np.uint8],
    out: NDArray[np.int64],
) -> None:
    """Writes the start of the block of every set bit; there are exactly `out.size` of them.

    In a plain bitmap every bit is a block.
    """
    found = 0
    for byte in range(bitmap.size):
        value = bitmap[byte]
        while value:
            out[found] = (byte * 8 + bits[value] - (0 if plain else found)) << low
            value &= value - np.uint8(1)
            found += 1


@compiled
def _count(bitmap: NDArray[np.uint8], ones: NDArray[np.uint8]) -> int:
    total = 0
    for value in bitmap:
        total += ones[value]
    return total


@compiled
def _in_last_block(bitmap: NDArray[np.uint8], bitmap_bits: int, count: int, last: int) -> int:
    """Counts the positions (of `count`) in block number `last`; -1 if any is beyond."""
    found = 0
    for place in range(bitmap_bits - 1, -1, -1):
        if bitmap[place >> 3] >> (place & 7) & 1:
            block = place - (count - 1 - found)
            if block > last:
                return -1
            if block < last:
                return found
            found += 1
    return found


# For every byte value: the number of set bits, and the first of them.
_ONES = np.array([value.bit_count() for value in range(256)], dtype=np.uint8)
_FIRST = np.array([(v & -v).bit_length() - 1 if v else 0 for v in range(256)], dtype=np.uint8)


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    bitmap_bytes, width = -(-bitmap_bits // 8), max(0, low)
    out = torch.zeros(bitmap_bytes + -(-index.numel() * width // 8), dtype=torch.uint8)
    _mark(index.numpy(), width, low == PLAIN, out[:bitmap_bytes].numpy())
    if width:
        out[bitmap_bytes:] = pack_bits(index & ((1 << width) - 1), width)
    return out


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    bitmap_bytes = -(-bitmap_bits // 8)
    out = torch.empty(count, dtype=torch.int64)
    _blocks(packed[:bitmap_bytes].numpy(), max(0, low), low == PLAIN, _FIRST, out.numpy())
    if low > 0:
        out |= unpack_bits(packed[bitmap_bytes:], low, count)
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    bitmap_bytes = -(-bitmap_bits // 8)
    bitmap = packed[:bitmap_bytes].numpy()
    spare = bitmap_bytes * 8 - bitmap_bits
    if _count(bitmap, _ONES) != count or (spare and int(bitmap[-1]) >> (8 - spare)):
        return torch.tensor(False)
    if low == PLAIN:
        return torch.tensor(True)
    # Blocks ascend, so positions before the last block are valid whatever their low bits are.
    last = max(0, numel - 1) >> low
    tail = _in_last_block(bitmap, bitmap_bits, count, last)
    if tail < 0:
        return torch.tensor(False)
    lows = unpack_bits(packed[bitmap_bytes:], low, count)[count - tail :]
    return ((last << low) + lows < numel).all()
