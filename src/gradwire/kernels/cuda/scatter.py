"""Gather and scatter of selected entries (definition: kernels/reference/scatter.py).

Many sparse messages of different lengths are added by one launch. A program owns a range of the
output and goes through the messages in order, so no two programs write the same entry, and the
range stays in the cache. The start of a range in each bitmap of positions (the format:
wire/indices.py) follows from counts of ones per segment: the block of a bit is the number of zeros
before it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import number_at, ones
from gradwire.kernels.reference.packing import bitmap_bits, low_bits
from gradwire.kernels.validation import check_out

TOGETHER = 8
"""So many messages are added by one launch."""
STRETCH = 256
WINDOW = 1024
"""Bits of a map that a program looks at together."""
AIM = 700
"""So many of them are about what a range has in the longest map."""
BLOCK = 1024
SUMMED = 4096

# Every message begins somewhere else and has another length, and in a tuple Triton compiles for
# each that is a multiple of 16 or not: at every step anew. So rows are arguments of their own.
MAPS, VALUES, BITS, LOWS = ([f"{of}{row}" for row in range(TOGETHER)] for of in "mvbl")
SCALARS = ["stretches", "ranges", "each", "steps"]


@triton.jit(do_not_specialize=[*MAPS, *BITS, *SCALARS])
def _count_kernel(
    m0, m1, m2, m3, m4, m5, m6, m7, b0, b1, b2, b3, b4, b5, b6, b7, counts_ptr, stretches,
    ROWS: tl.constexpr, STRETCH: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The ones of every stretch of every row's map."""
    maps = (m0, m1, m2, m3, m4, m5, m6, m7)
    bits = (b0, b1, b2, b3, b4, b5, b6, b7)
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


@triton.jit(do_not_specialize=SCALARS)
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


@triton.jit(do_not_specialize=[*LOWS, *SCALARS])
def _find_kernel(
    l0, l1, l2, l3, l4, l5, l6, l7, sums_ptr, begins_ptr, stretches, ranges, each, steps,
    ROWS: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With which stretch each range of entries begins, and where the last one ends."""
    lows = (l0, l1, l2, l3, l4, l5, l6, l7)
    row = tl.program_id(1)
    low = tl.full((), 0, tl.int64)
    for number in tl.static_range(ROWS):
        low = tl.where(row == number, lows[number], low)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = place * (each >> low)
    least = tl.zeros((BLOCK,), tl.int64)
    most = least + stretches
    # Triton's interpreter has no range() up to an argument.
    while steps > 0:
        middle = (least + most) // 2
        on = least < most
        ahead = tl.load(sums_ptr + row * stretches + middle - 1, mask=on & (middle > 0), other=0)
        lower = on & (middle * STRETCH - ahead < block)
        least = tl.where(lower, middle + 1, least)
        most = tl.where(on & ~lower, middle, most)
        steps -= 1
    # The stretch before may still have ones of that block.
    at = begins_ptr + row * (ranges + 1) + place
    tl.store(at, tl.maximum(least - 1, 0).to(tl.int32), mask=place <= ranges)


@triton.jit(do_not_specialize=[*MAPS, *VALUES, *BITS, *LOWS, *SCALARS])
def _add_kernel(
    m0, m1, m2, m3, m4, m5, m6, m7, v0, v1, v2, v3, v4, v5, v6, v7,
    b0, b1, b2, b3, b4, b5, b6, b7, l0, l1, l2, l3, l4, l5, l6, l7,
    sums_ptr, begins_ptr, out_ptr, stretches, ranges, each, weight, ROWS: tl.constexpr,
    BYTES: tl.constexpr, WIDE: tl.constexpr, STRETCH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Only beginnings need 64 bits; all in a window is counted from there, WIDE where it is far."""
    maps, values = (m0, m1, m2, m3, m4, m5, m6, m7), (v0, v1, v2, v3, v4, v5, v6, v7)
    bits, lows = (b0, b1, b2, b3, b4, b5, b6, b7), (l0, l1, l2, l3, l4, l5, l6, l7)
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
            place = (block.to(low.dtype) << low) | number_at(
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
    check_out(out)
    for start in range(0, len(values), TOGETHER):
        maps, said = packed[start : start + TOGETHER], values[start : start + TOGETHER]
        if any(v.numel() for v in said):
            # What is beyond the rows is passed, but not looked at.
            spare = TOGETHER - len(said)
            filled = [*maps, *[maps[-1]] * spare], [*said, *[said[-1]] * spare]
            _add_some(out, len(said), *filled, weight)


def _add_some(
    out: Tensor, rows: int, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
) -> None:
    numel = out.numel()
    # Who says nothing has no map, but is a row: for other numbers of rows kernels are compiled.
    bits = [bitmap_bits(numel, v.numel()) if v.numel() else 0 for v in values]
    lows = [low_bits(numel, v.numel()) if v.numel() else 0 for v in values]
    stretches = -(-max(bits) // STRETCH)
    # Whole blocks of every row.
    unit = 1 << max(lows)
    each = max(numel * AIM // max(bits) // unit, 1) * unit
    ranges = -(-numel // each)
    counts = torch.empty(rows, stretches, dtype=torch.int32, device=out.device)
    begins = torch.empty(rows, ranges + 1, dtype=torch.int32, device=out.device)
    together = 16384 // STRETCH
    _count_kernel[(-(-stretches // together), rows)](
        *packed, *bits, counts, stretches, ROWS=rows, STRETCH=STRETCH, EACH=together
    )
    sums = torch.empty(rows, stretches, dtype=torch.int64, device=out.device)
    _sum_kernel[(rows,)](counts, sums, stretches, BLOCK=SUMMED, num_warps=8)
    _find_kernel[(ranges // BLOCK + 1, rows)](
        *lows, sums, begins, stretches, ranges, each, stretches.bit_length(), ROWS=rows,
        STRETCH=STRETCH, BLOCK=BLOCK,
    )  # fmt: skip
    _add_kernel[(ranges,)](
        *packed, *values, *bits, *lows, sums, begins, out, stretches, ranges, each, weight,
        ROWS=rows, BYTES=(max(lows) + 14) // 8, WIDE=each > 1 << 24, STRETCH=STRETCH,
        WINDOW=WINDOW,
        # A fused multiply-add rounds otherwise than the reference.
        enable_fp_fusion=False,
    )  # fmt: skip


CHUNK = 512


@triton.jit
def said(chosen, values_ptr, HALF: tl.constexpr):
    """Entries in the number format of a message."""
    value = chosen
    if HALF:
        # Finite entries beyond float16 become its largest number. Comparisons leave NaN alone.
        beyond = (tl.abs(chosen) > 65504.0) & (tl.abs(chosen) != float("inf"))
        value = tl.where(beyond, tl.where(chosen > 0, 65504.0, -65504.0), chosen)
    return value.to(values_ptr.dtype.element_ty)


@triton.jit
def _lift_kernel(left_ptr, index_ptr, values_ptr, count, HALF: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = i < count
    place = tl.load(index_ptr + i, mask=inside, other=0)
    chosen = tl.load(left_ptr + place, mask=inside, other=0.0)
    value = said(chosen, values_ptr, HALF)
    tl.store(values_ptr + i, value, mask=inside)
    tl.store(left_ptr + place, chosen - value.to(tl.float32), mask=inside)


@triton.jit
def _add_at_kernel(
    out_ptr, index_ptr, rows_ptr, stride, count, weight, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = i < count
    place = tl.load(index_ptr + i, mask=inside, other=0)
    total = tl.load(out_ptr + place, mask=inside, other=0.0)
    for row in range(ROWS):
        value = tl.load(rows_ptr + row * stride + i, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out_ptr + place, total, mask=inside)


def lift(residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    count = index.numel()
    values = torch.empty(count, dtype=dtype, device=residual_out.device)
    if count:
        grid, half = -(-count // CHUNK), dtype == torch.float16
        _lift_kernel[(grid,)](residual_out, index, values, count, HALF=half, CHUNK=CHUNK)
    return values


def add_at(out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None:
    check_out(out)
    count = index.numel()
    if count:
        _add_at_kernel[(-(-count // CHUNK),)](
            out, index, rows, rows.stride(0), count, weight,
            ROWS=rows.shape[0], CHUNK=CHUNK,
            # A fused multiply-add rounds otherwise than the reference.
            enable_fp_fusion=False,
        )  # fmt: skip


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    add_told(out, packed.unbind(), values.unbind(), weight)
