"""Ascending positions as a bitmap of blocks and packed low bits (the format: wire/indices.py).

A set bit's rank is the number of ones before it: they are counted by stretches of the map first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.bits import number_at, ones, packed_word, unpacked

BLOCK = 1024


@triton.jit(do_not_specialize=["base", "words"])
def _pack_kernel(
    index_ptr, out_ptr, count, base, words, LOW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    place = (tl.load(index_ptr + i, mask=i < count, other=0) >> LOW) + i
    bit = (tl.full((BLOCK,), 1, tl.uint32) << (place % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(out_ptr + place // 32, bit, mask=i < count, sem="relaxed")
    # The low bits begin at bit `base`, inside a word that may have bits of the map too.
    if LOW > 0 and base // 32 + first < words:
        word = base // 32 + i
        mask = (tl.full((), 1, tl.int64) << LOW) - 1
        lows = packed_word(index_ptr, word * 32 - base, count, mask, LOW)
        tl.atomic_or(out_ptr + word, lows, mask=word < words, sem="relaxed")


# Messages begin anywhere, and have any length.
PLACES = ["packed_ptr", "low_ptr"]
LENGTHS = ["bits", "count", "limit", "low", "stretches"]


@triton.jit(do_not_specialize=[*PLACES, *LENGTHS])
def _count_kernel(
    packed_ptr, counts_ptr, bits, stretches, STRETCH: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """The ones of every stretch of the map."""
    stretch = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    byte = stretch[:, None] * (STRETCH // 8) + tl.arange(0, STRETCH // 8)[None, :]
    held = tl.load(packed_ptr + byte, mask=byte * 8 < bits, other=0)
    # What follows the map in its last byte is no part of it.
    spare = tl.minimum(tl.maximum(byte * 8 + 8 - bits, 0), 8).to(tl.uint32)
    many = ones(held.to(tl.uint32) & (tl.full((), 255, tl.uint32) >> spare)).to(tl.int32)
    tl.store(counts_ptr + stretch, tl.sum(many, axis=1), mask=stretch < stretches)


@triton.jit
def _ones_at(packed_ptr, stretch, before, bits, STRETCH: tl.constexpr):
    """The bits of a stretch of the map: their numbers, whether they are set, and their ranks."""
    bit = stretch.to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    held = tl.load(packed_ptr + bit // 8, mask=bit < bits, other=0).to(tl.int32)
    one = (held >> (bit % 8).to(tl.int32)) & 1
    return bit, one, before + tl.cumsum(one, 0) - one


@triton.jit(do_not_specialize=[*PLACES, *LENGTHS])
def _walk_kernel(
    packed_ptr, sums_ptr, low_ptr, out_ptr, bits, count, LOW: tl.constexpr, STRETCH: tl.constexpr
):  # fmt: skip
    """Writes every position."""
    program = tl.program_id(0)
    before = tl.load(sums_ptr + program - 1, mask=program > 0, other=0)
    bit, one, rank = _ones_at(packed_ptr, program, before, bits, STRETCH)
    # A wrong map may have more ones than there are positions.
    here = (one != 0) & (rank < count)
    place = (bit - rank) << LOW
    if LOW > 0:
        place |= unpacked(low_ptr, rank, here, LOW)
    tl.store(out_ptr + rank, place, mask=here)


@triton.jit(do_not_specialize=[*PLACES, *LENGTHS])
def _fits_kernel(
    packed_ptr, low_ptr, out_ptr, bits, count, limit, low, BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for all: whether the map has `count` ones, and none of them is out of range.

    A map with that many ones has as many zeros as there are blocks, and a one's block is the number
    of zeros before it. So only ones after the last zero lie beyond the last block; and only those
    right before it, which are in the last block, may have low bits that reach `limit`.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    start = tl.full((), 0, tl.int64)
    while start * 8 < bits:
        byte = start + lane
        held = tl.load(packed_ptr + byte, mask=byte * 8 < bits, other=0)
        total += ones(held.to(tl.uint32)).to(tl.int64)
        start += BLOCK
    last = bits - 1
    end = tl.load(packed_ptr + last // 8).to(tl.int32)
    # The last bit of the map, and what follows it in its byte.
    wrong = ((end >> (last % 8).to(tl.int32)) != 0).to(tl.int32)
    rank = tl.full((), 0, tl.int64) + count - 1
    more = rank >= 0
    while more:
        bit = last - 1 - (count - 1 - rank) - lane
        byte = tl.load(packed_ptr + bit // 8, mask=bit >= 0, other=0).to(tl.int32)
        one = (byte >> (bit % 8).to(tl.int32)) & (bit >= 0).to(tl.int32)
        here = (tl.cumsum(one, 0) == lane + 1) & (rank - lane >= 0)
        first = tl.maximum(rank - lane, 0) * low
        place = number_at(low_ptr, first, here, low, BYTES)
        wrong += tl.sum((here & (place >= limit)).to(tl.int32))
        more = (tl.sum(here.to(tl.int32)) == BLOCK) & (rank >= BLOCK)
        rank -= BLOCK
    tl.store(out_ptr, ((tl.sum(total) == count) & (wrong == 0)).to(tl.uint8))


def _counted(packed: Tensor, bits: int) -> tuple[Tensor, int]:
    """How many ones the map has up to the end of each stretch, and a stretch's length."""
    # Few enough stretches for one program to look at all of them.
    stretch = max(1024, triton.next_power_of_2(-(-bits // 4096)))
    stretches = -(-bits // stretch)
    counts = torch.empty(stretches, dtype=torch.int32, device=packed.device)
    together = max(1, 16384 // stretch)
    _count_kernel[(-(-stretches // together),)](
        packed, counts, bits, stretches, STRETCH=stretch, TOGETHER=together
    )
    return counts.cumsum(0), stretch


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    count, border = index.numel(), -(-bitmap_bits // 8)
    nbytes = border + -(-count * low // 8)
    words = -(-nbytes // 4)
    out = torch.zeros(words, dtype=torch.int32, device=index.device)
    lanes = max(count, words - border // 4)
    if count:
        _pack_kernel[(-(-lanes // BLOCK),)](
            index,
            out,
            count,
            border * 8,
            words,
            LOW=low,
            BLOCK=BLOCK,
        )
    return out.view(torch.uint8)[:nbytes]


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    sums, stretch = _counted(packed, bitmap_bits)
    lows = packed[-(-bitmap_bits // 8) :]
    _walk_kernel[(sums.numel(),)](
        packed, sums, lows, out, bitmap_bits, count, LOW=low, STRETCH=stretch
    )
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    fits = torch.empty((), dtype=torch.uint8, device=packed.device)
    lows, limit = packed[-(-bitmap_bits // 8) :], numel - (bitmap_bits - count - 1 << low)
    # Not compiled for every `low`: those of messages with a length of their own change by step.
    reach = (low + 14) // 8
    _fits_kernel[(1,)](packed, lows, fits, bitmap_bits, count, limit, low, BYTES=reach, BLOCK=BLOCK)
    return fits.view(torch.bool)
