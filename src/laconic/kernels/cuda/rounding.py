"""Stochastic rounding to a few levels, bucket by bucket (the meaning: kernels/reference).

One pass: a program holds whole buckets, so scale, codes, packed bytes and what is left come from
one reading of gradient and residual. Widths that fill bytes are packed here, the others by torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import reference

# Entries that a program holds at once, the fastest of 512 to 8192 on an H200.
PACK_TILE = 2048
ADD_TILE = 512


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


# A key must not be taken for a constant, nor for a signed number.
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _pack_kernel(
    x_ptr, residual_ptr, left_ptr, codes_ptr, scales_ptr, decay, numel, buckets, key_low, key_high,
    FEEDBACK: tl.constexpr, L2: tl.constexpr, LEVELS: tl.constexpr, PER_BYTE: tl.constexpr,
    BUCKET: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SPAN)
    place = row[:, None] * BUCKET + column[None, :]
    inside = (column[None, :] < BUCKET) & (place < numel)
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=inside, other=0.0)
    size = tl.abs(total)
    if L2:
        wide = size.to(tl.float64)
        scale = tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)
    else:
        # The bits of magnitudes sort as they do, and NaN above them all.
        scale = tl.max(size.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    tl.store(scales_ptr + row, scale, mask=row < buckets)
    step = tl.where(scale > 0, tl.div_rn(tl.full((ROWS,), LEVELS, tl.float32), scale), 0.0)
    exact = size * step[:, None]
    down = tl.floor(exact)
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    word = _hash32(low ^ key_low.to(tl.uint32))
    word = _hash32(word ^ key_high.to(tl.uint32) ^ (place >> 32).to(tl.uint32))
    chance = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
    level = tl.minimum(down + (chance < exact - down).to(tl.float32), LEVELS)
    level = tl.where(level >= 0, level, 0.0)
    signed = tl.where(total < 0, -level, level)
    if FEEDBACK:
        unit = tl.div_rn(scale, tl.full((ROWS,), LEVELS, tl.float32))
        tl.store(left_ptr + place, total - signed * unit[:, None], mask=inside)
    code = tl.where(inside, (signed + LEVELS).to(tl.int32), 0)
    if PER_BYTE == 1:
        tl.store(codes_ptr + place, code.to(tl.uint8), mask=inside)
    else:
        parts = tl.reshape(code, (ROWS, SPAN // PER_BYTE, PER_BYTE))
        shift = tl.arange(0, PER_BYTE) * (8 // PER_BYTE)
        packed = tl.sum(parts << shift[None, None, :], axis=2).to(tl.uint8)
        byte = tl.arange(0, SPAN // PER_BYTE)
        at = row[:, None] * (BUCKET // PER_BYTE) + byte[None, :]
        good = (byte[None, :] * PER_BYTE < BUCKET) & (at * PER_BYTE < numel)
        tl.store(codes_ptr + at, packed, mask=good)


@triton.jit
def _add_kernel(
    out_ptr, codes_ptr, scales_ptr, row_bytes, row_scales, numel, MESSAGES: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Any width and bucket: every entry looks its own bits up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(out_ptr + place, mask=inside, other=0.0)
    first = place * WIDTH
    for message in range(MESSAGES):
        byte = tl.load(codes_ptr + message * row_bytes + first // 8, mask=inside, other=0)
        code = byte.to(tl.int32) >> (first % 8).to(tl.int32)
        if 8 % WIDTH != 0:
            more = inside & (first % 8 + WIDTH > 8)
            after = tl.load(codes_ptr + message * row_bytes + first // 8 + 1, mask=more, other=0)
            code |= after.to(tl.int32) << (8 - first % 8).to(tl.int32)
        at = message * row_scales + place // BUCKET
        unit = tl.div_rn(tl.load(scales_ptr + at, mask=inside, other=0.0), LEVELS * 1.0)
        total += ((code & ((1 << WIDTH) - 1)) - LEVELS).to(tl.float32) * unit
    tl.store(out_ptr + place, total, mask=inside)


@triton.jit
def _add_rows_kernel(
    out_ptr, codes_ptr, scales_ptr, row_bytes, row_scales, numel, buckets, MESSAGES: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, BUCKET: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Buckets of a power of two and widths that fill bytes: every byte is read once."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    total = tl.load(out_ptr + place, mask=place < numel, other=0.0)
    at = row[:, None] * (BUCKET // PER_BYTE) + tl.arange(0, BUCKET // PER_BYTE)[None, :]
    good = at * PER_BYTE < numel
    shift = tl.arange(0, PER_BYTE) * WIDTH
    for message in range(MESSAGES):
        bytes_ = tl.load(codes_ptr + message * row_bytes + at, mask=good, other=0).to(tl.int32)
        code = tl.reshape(bytes_[:, :, None] >> shift[None, None, :], (ROWS, BUCKET))
        scale = tl.load(scales_ptr + message * row_scales + row, mask=row < buckets, other=0.0)
        unit = tl.div_rn(scale, LEVELS * 1.0)
        total += ((code & ((1 << WIDTH) - 1)) - LEVELS).to(tl.float32) * unit[:, None]
    tl.store(out_ptr + place, total, mask=place < numel)


def _pack(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, width: int, bucket: int, l2: bool,
    key: int, feedback: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numel = x.numel()
    buckets = -(-numel // bucket)
    # A byte must not hold entries of two buckets.
    per_byte = 8 // width if 8 % width == 0 and bucket % (8 // width) == 0 else 1
    codes = torch.empty(-(-numel // per_byte), dtype=torch.uint8, device=x.device)
    scales = torch.empty(buckets, device=x.device)
    span = max(triton.next_power_of_2(bucket), per_byte)
    rows = max(1, PACK_TILE // span)
    if numel:
        _pack_kernel[(-(-buckets // rows),)](
            x, residual, left, codes, scales, decay, numel, buckets,
            key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF,
            FEEDBACK=feedback, L2=l2, LEVELS=(1 << (width - 1)) - 1, PER_BYTE=per_byte,
            BUCKET=bucket, SPAN=span, ROWS=rows,
            # A fused multiply-add rounds otherwise than the reference, and so would the codes.
            enable_fp_fusion=False,
        )  # fmt: skip
    return (codes if per_byte * width == 8 else reference.pack_bits(codes, width)), scales


def round_pack(x: Tensor, width: int, bucket: int, l2: bool, key: int) -> tuple[Tensor, Tensor]:
    return _pack(x, x, 0.0, x, width, bucket, l2, key, feedback=False)


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, width: int, bucket: int, l2: bool,
    key: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _pack(x, residual, decay, left, width, bucket, l2, key, feedback=True)


def round_add(out: Tensor, codes: Tensor, scales: Tensor, width: int, bucket: int) -> None:
    numel, (messages, buckets) = out.numel(), scales.shape
    if not numel:
        return
    strides = codes.stride(0), scales.stride(0)
    levels = (1 << (width - 1)) - 1
    if (
        8 % width == 0
        and triton.next_power_of_2(bucket) == bucket
        and 8 // width <= bucket <= ADD_TILE
    ):
        rows = ADD_TILE // bucket
        _add_rows_kernel[(-(-buckets // rows),)](
            out, codes, scales, *strides, numel, buckets,
            MESSAGES=messages, WIDTH=width, LEVELS=levels, BUCKET=bucket, ROWS=rows,
        )  # fmt: skip
    else:
        _add_kernel[(-(-numel // ADD_TILE),)](
            out, codes, scales, *strides, numel,
            MESSAGES=messages, WIDTH=width, LEVELS=levels, BUCKET=bucket, BLOCK=ADD_TILE,
        )  # fmt: skip
