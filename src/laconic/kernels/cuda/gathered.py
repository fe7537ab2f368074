"""What many sparse messages say, added up at once, each of its own length.

A program has a range of entries and goes through the messages in order, so that no two programs
write the same entry, and what they write is still in the cache. Where a range begins in each map of
positions (the format: wire/indices.py) follows from counting its ones by stretches: the block of a
bit is the number of zeros before it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.bits import ones
from laconic.kernels.reference.index import bitmap_bits, low_bits

TOGETHER = 8
"""So many messages are added by one launch."""
STRETCH = 256
WINDOW = 1024
"""Bits of a map that a program looks at together."""
AIM = 700
"""So many of them are about what a range has in the longest map."""
BLOCK = 1024
SUMMED = 4096


@triton.jit
def _count_kernel(
    maps, bits, counts_ptr, stretches, ROWS: tl.constexpr, STRETCH: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """The ones of every stretch of every row's map."""
    stretch = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    byte = stretch[:, None] * (STRETCH // 8) + tl.arange(0, STRETCH // 8)[None, :]
    for row in tl.static_range(ROWS):
        if tl.program_id(1) == row:
            held = tl.load(maps[row] + byte, mask=byte * 8 < bits[row], other=0)
            # What follows the map in its last byte is no part of it.
            spare = tl.minimum(tl.maximum(byte * 8 + 8 - bits[row], 0), 8).to(tl.uint32)
            many = ones(held.to(tl.uint32) & (tl.full((), 255, tl.uint32) >> spare))
            found = tl.sum(many.to(tl.int32), axis=1)
            tl.store(counts_ptr + row * stretches + stretch, found, mask=stretch < stretches)


@triton.jit
def _sum_kernel(counts_ptr, sums_ptr, stretches, BLOCK: tl.constexpr):
    """How many ones a row's map has up to the end of each stretch."""
    first = tl.program_id(0).to(tl.int64) * stretches
    before = tl.full((), 0, tl.int64)
    begin = tl.full((), 0, tl.int32)
    while begin < stretches:
        at = begin + tl.arange(0, BLOCK)
        found = tl.load(counts_ptr + first + at, mask=at < stretches, other=0)
        tl.store(sums_ptr + first + at, before + tl.cumsum(found, 0), mask=at < stretches)
        before += tl.sum(found)
        begin += BLOCK


@triton.jit
def _find_kernel(
    lows, sums_ptr, begins_ptr, stretches, ranges, each, ROWS: tl.constexpr,
    STRETCH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With which stretch each range of entries begins, and where the last one ends."""
    row = tl.program_id(1)
    low = tl.full((), 0, tl.int64)
    for number in tl.static_range(ROWS):
        low = tl.where(row == number, lows[number], low)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = place * (each >> low)
    least = tl.zeros((BLOCK,), tl.int64)
    most = least + stretches
    for _ in range(STEPS):
        middle = (least + most) // 2
        on = least < most
        ahead = tl.load(sums_ptr + row * stretches + middle - 1, mask=on & (middle > 0), other=0)
        lower = on & (middle * STRETCH - ahead < block)
        least = tl.where(lower, middle + 1, least)
        most = tl.where(on & ~lower, middle, most)
    # The stretch before may still have ones of that block.
    at = begins_ptr + row * (ranges + 1) + place
    tl.store(at, tl.maximum(least - 1, 0).to(tl.int32), mask=place <= ranges)


@triton.jit
def _low_bits(ptr, bit, here, low, BYTES: tl.constexpr):
    """`low` bits from number `bit` on."""
    held = tl.zeros_like(bit)
    for j in tl.static_range(BYTES):
        needed = here & (8 * j < (bit % 8) + low)
        held |= tl.load(ptr + bit // 8 + j, mask=needed, other=0).to(bit.dtype) << (8 * j)
    return (held >> (bit % 8)) & ((tl.full((), 1, bit.dtype) << low) - 1)


@triton.jit
def _add_kernel(
    maps, values, bits, lows, sums_ptr, begins_ptr, out_ptr, stretches, ranges, each, weight,
    ROWS: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr, STRETCH: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Only beginnings need 64 bits; all in a window is counted from there, WIDE where it is far."""
    program = tl.program_id(0)
    out_ptr += program.to(tl.int64) * each
    lane = tl.arange(0, WINDOW)
    for row in tl.static_range(ROWS):
        low = tl.full((), 0, tl.int64 if WIDE else tl.int32) + lows[row]
        blocks = (tl.full((), 0, tl.int64) + each) >> low
        at = begins_ptr + row * (ranges + 1) + program
        stretch, last = tl.load(at).to(tl.int64), tl.load(at + 1)
        before_ptr = sums_ptr + row * stretches + stretch - 1
        before = tl.load(before_ptr, mask=stretch > 0, other=0)
        start = stretch * STRETCH
        end = tl.minimum((last + 1).to(tl.int64) * STRETCH, bits[row])
        lows_ptr = maps[row] + (bits[row] + 7) // 8
        while start < end:
            inside = lane < tl.minimum(end - start, WINDOW).to(tl.int32)
            held = tl.load(maps[row] + start // 8 + lane // 8, mask=inside, other=0).to(tl.int32)
            one = (held >> (lane % 8)) & inside.to(tl.int32)
            rank = tl.cumsum(one, 0) - one
            block = (start - before - program * blocks).to(tl.int32) + lane - rank
            here = (one != 0) & (block >= 0) & (block < blocks.to(low.dtype))
            bit = (before * low % 8).to(low.dtype) + rank * low
            place = (block.to(low.dtype) << low) | _low_bits(
                lows_ptr + before * low // 8, bit, here, low, BYTES
            )
            value = tl.load(values[row] + before + rank, mask=here, other=0.0).to(tl.float32)
            total = tl.load(out_ptr + place, mask=here, other=0.0)
            tl.store(out_ptr + place, total + value * weight, mask=here)
            before += tl.sum(one)
            start += WINDOW
        # The next row may add to the same entries, by other threads.
        tl.debug_barrier()


def add_told(
    out: Tensor, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
) -> None:
    said = [(p, v) for p, v in zip(packed, values, strict=True) if v.numel()]
    for start in range(0, len(said), TOGETHER):
        some = said[start : start + TOGETHER]
        _add_some(out, tuple(p for p, _ in some), tuple(v for _, v in some), weight)


def _add_some(
    out: Tensor, packed: tuple[Tensor, ...], values: tuple[Tensor, ...], weight: float
) -> None:
    numel, rows = out.numel(), len(packed)
    lows = tuple(low_bits(numel, v.numel()) for v in values)
    bits = tuple(bitmap_bits(numel, v.numel()) for v in values)
    stretches = -(-max(bits) // STRETCH)
    # Whole blocks of every row.
    unit = 1 << max(lows)
    each = max(numel * AIM // max(bits) // unit, 1) * unit
    ranges = -(-numel // each)
    counts = torch.empty(rows, stretches, dtype=torch.int32, device=out.device)
    begins = torch.empty(rows, ranges + 1, dtype=torch.int32, device=out.device)
    together = 16384 // STRETCH
    _count_kernel[(-(-stretches // together), rows)](
        packed, bits, counts, stretches, ROWS=rows, STRETCH=STRETCH, EACH=together
    )
    sums = torch.empty(rows, stretches, dtype=torch.int64, device=out.device)
    _sum_kernel[(rows,)](counts, sums, stretches, BLOCK=SUMMED, num_warps=8)
    _find_kernel[(ranges // BLOCK + 1, rows)](
        lows, sums, begins, stretches, ranges, each, ROWS=rows, STRETCH=STRETCH,
        STEPS=stretches.bit_length(), BLOCK=BLOCK,
    )  # fmt: skip
    _add_kernel[(ranges,)](
        packed, values, bits, lows, sums, begins, out, stretches, ranges, each, weight,
        ROWS=rows, BYTES=(max(lows) + 14) // 8, WIDE=each > 1 << 24, STRETCH=STRETCH,
        WINDOW=WINDOW,
        # A fused multiply-add rounds otherwise than the reference.
        enable_fp_fusion=False,
    )  # fmt: skip
