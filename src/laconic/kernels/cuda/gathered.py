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
STRETCHES = 4096
"""Of a map at most, so that one program can add them up."""


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
def _find_kernel(
    lows, counts_ptr, before_ptr, begins_ptr, stretches, ranges, range_bits, ROWS: tl.constexpr,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The ones before every stretch, and with which stretch each range of entries begins."""
    row = tl.program_id(0)
    low = tl.full((), 0, tl.int64)
    for number in tl.static_range(ROWS):
        low = tl.where(row == number, lows[number], low)
    i = tl.arange(0, STRETCHES)
    many = tl.load(counts_ptr + row * stretches + i, mask=i < stretches, other=0).to(tl.int64)
    before_ptr += row * stretches
    tl.store(before_ptr + i, tl.cumsum(many, 0) - many, mask=i < stretches)
    tl.debug_barrier()
    begin = tl.full((), 0, tl.int64)
    while begin <= ranges:
        place = begin + i
        block = place << (range_bits - low)
        least = tl.zeros((STRETCHES,), tl.int64)
        most = least + stretches
        for _ in range(STEPS):
            middle = (least + most) // 2
            on = least < most
            ahead = tl.load(before_ptr + middle, mask=on, other=0)
            low_enough = on & (middle * STRETCH - ahead < block)
            least = tl.where(low_enough, middle + 1, least)
            most = tl.where(on & ~low_enough, middle, most)
        # The stretch before may still have ones of that block.
        at = begins_ptr + row * (ranges + 1) + place
        tl.store(at, tl.maximum(least - 1, 0).to(tl.int32), mask=place <= ranges)
        begin += STRETCHES


@triton.jit
def _low_bits(packed_ptr, bits, rank, here, low, BYTES: tl.constexpr):
    """The packed low bits, `low` of them, of position number `rank`."""
    bit = rank * low
    start = packed_ptr + (bits + 7) // 8 + bit // 8
    held = tl.zeros_like(bit)
    for j in tl.static_range(BYTES):
        needed = here & (8 * j < (bit % 8) + low)
        held |= tl.load(start + j, mask=needed, other=0).to(tl.int64) << (8 * j)
    return (held >> (bit % 8)) & ((tl.full((), 1, tl.int64) << low) - 1)


@triton.jit
def _add_kernel(
    maps, values, bits, lows, before_ptr, begins_ptr, out_ptr, stretches, ranges, range_bits,
    weight, ROWS: tl.constexpr, BYTES: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, STRETCH)
    for row in tl.static_range(ROWS):
        packed, low = maps[row], tl.full((), 0, tl.int64) + lows[row]
        first = program.to(tl.int64) << (range_bits - low)
        beyond = (program.to(tl.int64) + 1) << (range_bits - low)
        at = begins_ptr + row * (ranges + 1) + program
        stretch, end = tl.load(at), tl.load(at + 1)
        while stretch <= end:
            bit = stretch.to(tl.int64) * STRETCH + lane
            held = tl.load(packed + bit // 8, mask=bit < bits[row], other=0).to(tl.int32)
            one = (held >> (bit % 8).to(tl.int32)) & 1
            rank = tl.load(before_ptr + row * stretches + stretch) + tl.cumsum(one, 0) - one
            block = bit - rank
            here = (one != 0) & (block >= first) & (block < beyond)
            place = (block << low) | _low_bits(packed, bits[row], rank, here, low, BYTES)
            value = tl.load(values[row] + rank, mask=here, other=0.0).to(tl.float32)
            total = tl.load(out_ptr + place, mask=here, other=0.0)
            tl.store(out_ptr + place, total + value * weight, mask=here)
            stretch += 1
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
    stretch = max(1024, triton.next_power_of_2(-(-max(bits) // STRETCHES)))
    stretches = -(-max(bits) // stretch)
    # A range has as many entries as a stretch tells, about.
    share = numel * stretch // max(bits)
    range_bits = max(share.bit_length() - 1, *lows, 0)
    ranges = -(-numel >> range_bits)
    counts = torch.empty(rows, stretches, dtype=torch.int32, device=out.device)
    before = torch.empty(rows, stretches, dtype=torch.int64, device=out.device)
    begins = torch.empty(rows, ranges + 1, dtype=torch.int32, device=out.device)
    each = max(1, 16384 // stretch)
    _count_kernel[(-(-stretches // each), rows)](
        packed, bits, counts, stretches, ROWS=rows, STRETCH=stretch, EACH=each
    )
    _find_kernel[(rows,)](
        lows, counts, before, begins, stretches, ranges, range_bits, ROWS=rows, STRETCH=stretch,
        STRETCHES=max(16, triton.next_power_of_2(stretches)), STEPS=stretches.bit_length(),
        num_warps=8,
    )  # fmt: skip
    _add_kernel[(ranges,)](
        packed, values, bits, lows, before, begins, out, stretches, ranges, range_bits, weight,
        ROWS=rows, BYTES=(max(lows) + 14) // 8, STRETCH=stretch,
        # A fused multiply-add rounds otherwise than the reference.
        enable_fp_fusion=False,
    )  # fmt: skip
