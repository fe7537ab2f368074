"""Bit packing of integers and of ascending positions (definition: kernels/reference/packing.py).

The rank of a set bit is the number of ones before it; ones are counted per segment of the bitmap
first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.packing import PLAIN

BLOCK = 1024


@triton.jit
def popcount(word):
    """Returns the number of set bits of each word (uint32)."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def trailing_zeros(word):
    """Returns the number of zeros below the lowest set bit of each word (uint32)."""
    return popcount((word & (0 - word)) - 1)


@triton.jit
def packed_word(values_ptr, start, count, mask, WIDTH: tl.constexpr):
    """Returns 32 bits of the stream of values & mask from bit `start` (int64, maybe < 0) on."""
    first = tl.where(start >= 0, start, start - WIDTH + 1) // WIDTH
    word = tl.zeros_like(start)
    for j in tl.static_range((31 + WIDTH) // WIDTH + 1):
        i = first + j
        inside = (i >= 0) & (i < count)
        value = tl.load(values_ptr + i, mask=inside, other=0).to(tl.int64) & mask
        shift = i * WIDTH - start
        above = tl.where((shift >= 0) & (shift < 32), value << (shift & 31), 0)
        word |= tl.where(shift < 0, value >> tl.minimum(-shift, 63), above)
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def unpack_value(packed_ptr, i, inside, WIDTH: tl.constexpr):
    """Returns value number i (int64) of the stream at `packed_ptr` (bytes), as int64."""
    bit = i * WIDTH
    value = tl.zeros_like(bit)
    for j in tl.static_range((WIDTH + 14) // 8):
        # The last byte may lie beyond this value, and beyond the end of the stream.
        needed = inside & (8 * j < (bit % 8) + WIDTH)
        byte = tl.load(packed_ptr + bit // 8 + j, mask=needed, other=0).to(tl.int64)
        value |= byte << (8 * j)
    return (value >> (bit % 8)) & ((1 << WIDTH) - 1)


@triton.jit
def load_bits(ptr, bit, inside, width, BYTES: tl.constexpr):
    """Returns `width` bits of a stream from bit `bit` on, which lie in at most BYTES bytes."""
    value = tl.zeros_like(bit)
    for j in tl.static_range(BYTES):
        needed = inside & (8 * j < (bit % 8) + width)
        value |= tl.load(ptr + bit // 8 + j, mask=needed, other=0).to(bit.dtype) << (8 * j)
    return (value >> (bit % 8)) & ((tl.full((), 1, bit.dtype) << width) - 1)


@triton.jit
def _pack_kernel(values_ptr, out_ptr, count, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = packed_word(values_ptr, word * 32, count, -1, WIDTH)
    tl.store(out_ptr + word, packed, mask=word < words)


@triton.jit
def _unpack_kernel(packed_ptr, out_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, unpack_value(packed_ptr, i, i < count, WIDTH), mask=i < count)


def pack_bits(values: Tensor, width: int) -> Tensor:
    count, nbytes = values.numel(), -(-values.numel() * width // 8)
    words = -(-nbytes // 4)
    out = torch.empty(words, dtype=torch.int32, device=values.device)
    if words:
        # Triton has no pointers to booleans.
        plain = values.view(torch.uint8) if values.dtype == torch.bool else values
        _pack_kernel[(-(-words // BLOCK),)](plain, out, count, words, WIDTH=width, BLOCK=BLOCK)
    return out.view(torch.uint8)[:nbytes]


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    if count:
        _unpack_kernel[(-(-count // BLOCK),)](packed, out, count, WIDTH=width, BLOCK=BLOCK)
    return out


@triton.jit(do_not_specialize=["base", "words"])
def _pack_index_kernel(
    index_ptr, out_ptr, count, base, words, LOW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sets a bit of the map for every position, and writes the low bits; LOW < 0: a plain map."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    bit_index = tl.load(index_ptr + i, mask=i < count, other=0)
    if LOW >= 0:
        bit_index = (bit_index >> LOW) + i
    bit = (tl.full((BLOCK,), 1, tl.uint32) << (bit_index % 32).to(tl.uint32)).to(
        tl.int32, bitcast=True
    )
    tl.atomic_or(out_ptr + bit_index // 32, bit, mask=i < count, sem="relaxed")
    # The low bits begin at bit `base`, in a word that may also hold bits of the map.
    if LOW > 0 and base // 32 + start < words:
        word = base // 32 + i
        mask = (tl.full((), 1, tl.int64) << LOW) - 1
        lows = packed_word(index_ptr, word * 32 - base, count, mask, LOW)
        tl.atomic_or(out_ptr + word, lows, mask=word < words, sem="relaxed")


# Messages have any alignment and any length.
POINTERS = ["packed_ptr", "low_ptr"]
LENGTHS = ["bits", "count", "limit", "low", "segments"]


@triton.jit(do_not_specialize=[*POINTERS, *LENGTHS])
def _count_kernel(
    packed_ptr, counts_ptr, bits, segments, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Counts the ones of every segment of the bitmap."""
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    byte = segment[:, None] * (SEGMENT // 8) + tl.arange(0, SEGMENT // 8)[None, :]
    bytes_ = tl.load(packed_ptr + byte, mask=byte * 8 < bits, other=0)
    # The rest of the map's last byte is no part of it.
    excess = tl.minimum(tl.maximum(byte * 8 + 8 - bits, 0), 8).to(tl.uint32)
    counts = popcount(bytes_.to(tl.uint32) & (tl.full((), 255, tl.uint32) >> excess)).to(tl.int32)
    tl.store(counts_ptr + segment, tl.sum(counts, axis=1), mask=segment < segments)


@triton.jit
def _segment_ones(packed_ptr, segment, before, bits, SEGMENT: tl.constexpr):
    """Returns the bit numbers of a segment of the bitmap, their values, and their ranks."""
    bit = segment.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)
    byte = tl.load(packed_ptr + bit // 8, mask=bit < bits, other=0).to(tl.int32)
    one = (byte >> (bit % 8).to(tl.int32)) & 1
    return bit, one, before + tl.cumsum(one, 0) - one


@triton.jit(do_not_specialize=[*POINTERS, *LENGTHS])
def _unpack_index_kernel(
    packed_ptr, sums_ptr, low_ptr, out_ptr, bits, count, LOW: tl.constexpr, SEGMENT: tl.constexpr
):  # fmt: skip
    """Writes all positions."""
    program = tl.program_id(0)
    before = tl.load(sums_ptr + program - 1, mask=program > 0, other=0)
    bit, one, rank = _segment_ones(packed_ptr, program, before, bits, SEGMENT)
    # An invalid map may have more ones than there are positions.
    here = (one != 0) & (rank < count)
    index = bit
    if LOW >= 0:
        index = (bit - rank) << LOW
    if LOW > 0:
        index |= unpack_value(low_ptr, rank, here, LOW)
    tl.store(out_ptr + rank, index, mask=here)


@triton.jit(do_not_specialize=[*POINTERS, *LENGTHS])
def _fits_kernel(
    packed_ptr, low_ptr, out_ptr, bits, count, limit, low, BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Checks in one program that the bitmap has `count` ones, all of them in range.

    All bits of a plain bitmap (`low` < 0) are in range. Another map with that many ones has as many
    zeros as there are blocks, and a one's block is the number of zeros before it. So only ones
    after the last zero lie beyond the last block; and only those right before it, which are in the
    last block, may have low bits that reach `limit`.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    start = tl.full((), 0, tl.int64)
    while start * 8 < bits:
        byte = start + lane
        bytes_ = tl.load(packed_ptr + byte, mask=byte * 8 < bits, other=0)
        total += popcount(bytes_.to(tl.uint32)).to(tl.int64)
        start += BLOCK
    last = bits - 1
    end = tl.load(packed_ptr + last // 8).to(tl.int32)
    plain = low < 0
    # The last bit of the map, unless it is plain, and the rest of its byte must be zero.
    wrong = ((end >> ((last % 8).to(tl.int32) + plain.to(tl.int32))) != 0).to(tl.int32)
    rank = tl.where(plain, -1, tl.full((), 0, tl.int64) + count - 1)
    more = rank >= 0
    while more:
        bit = last - 1 - (count - 1 - rank) - lane
        byte = tl.load(packed_ptr + bit // 8, mask=bit >= 0, other=0).to(tl.int32)
        one = (byte >> (bit % 8).to(tl.int32)) & (bit >= 0).to(tl.int32)
        here = (tl.cumsum(one, 0) == lane + 1) & (rank - lane >= 0)
        first = tl.maximum(rank - lane, 0) * low
        index = load_bits(low_ptr, first, here, low, BYTES)
        wrong += tl.sum((here & (index >= limit)).to(tl.int32))
        more = (tl.sum(here.to(tl.int32)) == BLOCK) & (rank >= BLOCK)
        rank -= BLOCK
    tl.store(out_ptr, ((tl.sum(total) == count) & (wrong == 0)).to(tl.uint8))


def _count_ones(packed: Tensor, bits: int) -> tuple[Tensor, int]:
    """Returns the ones up to the end of each segment of the bitmap, and a segment's length."""
    # Few enough segments for one program to sum over all of them.
    segment = max(1024, triton.next_power_of_2(-(-bits // 4096)))
    segments = -(-bits // segment)
    counts = torch.empty(segments, dtype=torch.int32, device=packed.device)
    per_program = max(1, 16384 // segment)
    _count_kernel[(-(-segments // per_program),)](
        packed, counts, bits, segments, SEGMENT=segment, SEGMENTS=per_program
    )
    return counts.cumsum(0), segment


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    count, map_bytes = index.numel(), -(-bitmap_bits // 8)
    nbytes = map_bytes + -(-count * max(0, low) // 8)
    words = -(-nbytes // 4)
    out = torch.zeros(words, dtype=torch.int32, device=index.device)
    threads = max(count, words - map_bytes // 4)
    if count:
        _pack_index_kernel[(-(-threads // BLOCK),)](
            index,
            out,
            count,
            map_bytes * 8,
            words,
            LOW=low,
            BLOCK=BLOCK,
        )
    return out.view(torch.uint8)[:nbytes]


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    sums, segment = _count_ones(packed, bitmap_bits)
    lows = packed[-(-bitmap_bits // 8) :]
    _unpack_index_kernel[(sums.numel(),)](
        packed, sums, lows, out, bitmap_bits, count, LOW=low, SEGMENT=segment
    )
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    fits = torch.empty((), dtype=torch.uint8, device=packed.device)
    lows = packed[-(-bitmap_bits // 8) :]
    limit = 0 if low == PLAIN else numel - (bitmap_bits - count - 1 << low)
    # Not compiled for every `low`, which changes by step where the message length varies.
    nbytes = (max(0, low) + 14) // 8
    _fits_kernel[(1,)](
        packed, lows, fits, bitmap_bits, count, limit, low, BYTES=nbytes, BLOCK=BLOCK
    )
    return fits.view(torch.bool)
