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

from gradwire.kernels.cuda.packing import load_bits, popcount
from gradwire.kernels.reference.packing import bitmap_bits, low_bits
from gradwire.kernels.validation import check_out

BATCH = 8
"""Messages added per launch."""
SEGMENT = 256
WINDOW = 1024
"""Bits of a map that a program handles at once."""
TARGET_BITS = 700
"""About so many bits of the longest map lie in a range."""
BLOCK = 1024
SUM_BLOCK = 4096

# Alignment and length differ between messages, and Triton specialises on the elements of a tuple
# (multiples of 16 or not), so it would compile at every step. So each row is an argument.
MAPS, VALUES, BITS, LOWS = ([f"{of}{row}" for row in range(BATCH)] for of in "mvbl")
SCALARS = ["segments", "ranges", "range_size", "steps"]


@triton.jit(do_not_specialize=[*MAPS, *BITS, *SCALARS])
def _count_kernel(
    m0, m1, m2, m3, m4, m5, m6, m7, b0, b1, b2, b3, b4, b5, b6, b7, counts_ptr, segments,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Counts the ones of every segment of every row's map."""
    maps = (m0, m1, m2, m3, m4, m5, m6, m7)
    bits = (b0, b1, b2, b3, b4, b5, b6, b7)
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    byte = segment[:, None] * (SEGMENT // 8) + tl.arange(0, SEGMENT // 8)[None, :]
    for row in tl.static_range(ROWS):
        if tl.program_id(1) == row:
            bytes_ = tl.load(maps[row] + byte, mask=byte * 8 < bits[row], other=0)
            # The rest of the map's last byte is no part of it.
            excess = tl.minimum(tl.maximum(byte * 8 + 8 - bits[row], 0), 8).to(tl.uint32)
            counts = popcount(bytes_.to(tl.uint32) & (tl.full((), 255, tl.uint32) >> excess))
            found = tl.sum(counts.to(tl.int32), axis=1)
            tl.store(counts_ptr + row * segments + segment, found, mask=segment < segments)


@triton.jit(do_not_specialize=SCALARS)
def _sum_kernel(counts_ptr, sums_ptr, segments, BLOCK: tl.constexpr):
    """Sums up the ones of a row's map up to the end of each segment."""
    row_start = tl.program_id(0).to(tl.int64) * segments
    before = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int32)
    while start < segments:
        at = start + tl.arange(0, BLOCK)
        found = tl.load(counts_ptr + row_start + at, mask=at < segments, other=0)
        tl.store(sums_ptr + row_start + at, before + tl.cumsum(found, 0), mask=at < segments)
        before += tl.sum(found)
        start += BLOCK


@triton.jit(do_not_specialize=[*LOWS, *SCALARS])
def _range_starts_kernel(
    l0, l1, l2, l3, l4, l5, l6, l7, sums_ptr, starts_ptr, segments, ranges, range_size, steps,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the segment with which each range of entries begins, and where the last range ends."""
    lows = (l0, l1, l2, l3, l4, l5, l6, l7)
    row = tl.program_id(1)
    low = tl.full((), 0, tl.int64)
    for number in tl.static_range(ROWS):
        low = tl.where(row == number, lows[number], low)
    # In a plain map (`low` < 0) every bit is a block; otherwise, every zero ends one.
    skipped = (low >= 0).to(tl.int64)
    low = tl.maximum(low, 0)
    range_index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = range_index * (range_size >> low)
    low_end = tl.zeros((BLOCK,), tl.int64)
    high_end = low_end + segments
    # Triton's interpreter does not support range() up to an argument.
    while steps > 0:
        middle = (low_end + high_end) // 2
        open_ = low_end < high_end
        ones_before = tl.load(
            sums_ptr + row * segments + middle - 1, mask=open_ & (middle > 0), other=0
        )
        lower = open_ & (middle * SEGMENT - ones_before * skipped < block)
        low_end = tl.where(lower, middle + 1, low_end)
        high_end = tl.where(open_ & ~lower, middle, high_end)
        steps -= 1
    # The previous segment may still have ones of that block.
    at = starts_ptr + row * (ranges + 1) + range_index
    tl.store(at, tl.maximum(low_end - 1, 0).to(tl.int32), mask=range_index <= ranges)


@triton.jit(do_not_specialize=[*MAPS, *VALUES, *BITS, *LOWS, *SCALARS])
def _add_kernel(
    m0, m1, m2, m3, m4, m5, m6, m7, v0, v1, v2, v3, v4, v5, v6, v7,
    b0, b1, b2, b3, b4, b5, b6, b7, l0, l1, l2, l3, l4, l5, l6, l7,
    sums_ptr, starts_ptr, out_ptr, segments, ranges, range_size, weight, ROWS: tl.constexpr,
    BYTES: tl.constexpr, INT64: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds messages to a range; offsets are relative to its start, INT64 if the range is large."""
    maps, values = (m0, m1, m2, m3, m4, m5, m6, m7), (v0, v1, v2, v3, v4, v5, v6, v7)
    bits, lows = (b0, b1, b2, b3, b4, b5, b6, b7), (l0, l1, l2, l3, l4, l5, l6, l7)
    program = tl.program_id(0)
    out_ptr += program.to(tl.int64) * range_size
    lane = tl.arange(0, WINDOW)
    for row in tl.static_range(ROWS):
        low = tl.full((), 0, tl.int64 if INT64 else tl.int32) + lows[row]
        skipped = (low >= 0).to(tl.int32)
        low = tl.maximum(low, 0)
        blocks = (tl.full((), 0, tl.int64) + range_size) >> low
        at = starts_ptr + row * (ranges + 1) + program
        segment, last = tl.load(at).to(tl.int64), tl.load(at + 1)
        before_ptr = sums_ptr + row * segments + segment - 1
        before = tl.load(before_ptr, mask=segment > 0, other=0)
        start = segment * SEGMENT
        end = tl.minimum((last + 1).to(tl.int64) * SEGMENT, bits[row])
        lows_ptr = maps[row] + (bits[row] + 7) // 8
        while start < end:
            inside = lane < tl.minimum(end - start, WINDOW).to(tl.int32)
            bytes_ = tl.load(maps[row] + start // 8 + lane // 8, mask=inside, other=0).to(tl.int32)
            one = (bytes_ >> (lane % 8)) & inside.to(tl.int32)
            rank = tl.cumsum(one, 0) - one
            block = (start - before * skipped - program * blocks).to(tl.int32) + lane
            block -= rank * skipped
            here = (one != 0) & (block >= 0) & (block < blocks.to(low.dtype))
            bit = (before * low % 8).to(low.dtype) + rank * low
            index = (block.to(low.dtype) << low) | load_bits(
                lows_ptr + before * low // 8, bit, here, low, BYTES
            )
            value = tl.load(values[row] + before + rank, mask=here, other=0.0).to(tl.float32)
            total = tl.load(out_ptr + index, mask=here, other=0.0)
            tl.store(out_ptr + index, total + value * weight, mask=here)
            before += tl.sum(one)
            start += WINDOW
        # In the next row other threads may add to the same entries.
        tl.debug_barrier()


def add_packed_ragged(
    out: Tensor, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
) -> None:
    check_out(out)
    for start in range(0, len(values), BATCH):
        batch_maps, batch_values = packed[start : start + BATCH], values[start : start + BATCH]
        if any(v.numel() for v in batch_values):
            # The kernels take BATCH rows; the padding is never read.
            padding = BATCH - len(batch_values)
            padded = (
                [*batch_maps, *[batch_maps[-1]] * padding],
                [*batch_values, *[batch_values[-1]] * padding],
            )
            _add_batch(out, len(batch_values), *padded, weight)


def _add_batch(
    out: Tensor, rows: int, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
) -> None:
    numel = out.numel()
    # An empty message has no map, but stays a row: kernels are compiled per number of rows.
    bits = [bitmap_bits(numel, v.numel()) if v.numel() else 0 for v in values]
    lows = [low_bits(numel, v.numel()) if v.numel() else 0 for v in values]
    segments = -(-max(bits) // SEGMENT)
    # Whole blocks of every row.
    unit = 1 << max(0, *lows)
    range_size = max(numel * TARGET_BITS // max(bits) // unit, 1) * unit
    ranges = -(-numel // range_size)
    counts = torch.empty(rows, segments, dtype=torch.int32, device=out.device)
    starts = torch.empty(rows, ranges + 1, dtype=torch.int32, device=out.device)
    per_program = 16384 // SEGMENT
    _count_kernel[(-(-segments // per_program), rows)](
        *packed, *bits, counts, segments, ROWS=rows, SEGMENT=SEGMENT, SEGMENTS=per_program
    )
    sums = torch.empty(rows, segments, dtype=torch.int64, device=out.device)
    _sum_kernel[(rows,)](counts, sums, segments, BLOCK=SUM_BLOCK, num_warps=8)
    _range_starts_kernel[(ranges // BLOCK + 1, rows)](
        *lows, sums, starts, segments, ranges, range_size, segments.bit_length(), ROWS=rows,
        SEGMENT=SEGMENT, BLOCK=BLOCK,
    )  # fmt: skip
    _add_kernel[(ranges,)](
        *packed, *values, *bits, *lows, sums, starts, out, segments, ranges, range_size, weight,
        ROWS=rows, BYTES=(max(0, *lows) + 14) // 8, INT64=range_size > 1 << 24, SEGMENT=SEGMENT,
        WINDOW=WINDOW,
        # A fused multiply-add rounds differently from the reference.
        enable_fp_fusion=False,
    )  # fmt: skip


CHUNK = 512


@triton.jit
def to_wire_dtype(x, values_ptr, HALF: tl.constexpr):
    """Converts entries to the number format of a message."""
    value = x
    if HALF:
        # Finite entries beyond float16 are clamped. Comparisons with NaN are false, so NaN stays.
        beyond = (tl.abs(x) > 65504.0) & (tl.abs(x) != float("inf"))
        value = tl.where(beyond, tl.where(x > 0, 65504.0, -65504.0), x)
    return value.to(values_ptr.dtype.element_ty)


@triton.jit
def _extract_kernel(
    residual_out_ptr, index_ptr, values_ptr, count, HALF: tl.constexpr, CHUNK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = i < count
    index = tl.load(index_ptr + i, mask=inside, other=0)
    total = tl.load(residual_out_ptr + index, mask=inside, other=0.0)
    value = to_wire_dtype(total, values_ptr, HALF)
    tl.store(values_ptr + i, value, mask=inside)
    tl.store(residual_out_ptr + index, total - value.to(tl.float32), mask=inside)


@triton.jit
def _add_at_kernel(
    out_ptr, index_ptr, rows_ptr, stride, count, weight, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = i < count
    index = tl.load(index_ptr + i, mask=inside, other=0)
    total = tl.load(out_ptr + index, mask=inside, other=0.0)
    for row in range(ROWS):
        value = tl.load(rows_ptr + row * stride + i, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out_ptr + index, total, mask=inside)


def extract(residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    count = index.numel()
    values = torch.empty(count, dtype=dtype, device=residual_out.device)
    if count:
        grid, half = -(-count // CHUNK), dtype == torch.float16
        _extract_kernel[(grid,)](residual_out, index, values, count, HALF=half, CHUNK=CHUNK)
    return values


def add_at(out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None:
    check_out(out)
    count = index.numel()
    if count:
        _add_at_kernel[(-(-count // CHUNK),)](
            out, index, rows, rows.stride(0), count, weight,
            ROWS=rows.shape[0], CHUNK=CHUNK,
            # A fused multiply-add rounds differently from the reference.
            enable_fp_fusion=False,
        )  # fmt: skip


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    add_packed_ragged(out, packed.unbind(), values.unbind(), weight)
