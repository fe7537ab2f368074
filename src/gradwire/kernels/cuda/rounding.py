"""Quantization bucket by bucket (definition: kernels/reference/rounding.py).

One pass: a program holds whole buckets, so scale, codes, packed bytes and residual come from one
read of gradient and residual. Widths that divide a byte are packed here, the others in a second
pass; buckets too large for a program are left to torch.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda import codes as quantizer
from gradwire.kernels.cuda.codes import encode
from gradwire.kernels.cuda.packing import pack_bits
from gradwire.kernels.cuda.random import KEYS, key_words, random_bits
from gradwire.kernels.reference import rounding as reference
from gradwire.kernels.reference.rounding import slopes, tree
from gradwire.kernels.specs import RoundingSpec
from gradwire.kernels.validation import check_out
from gradwire.types import Key

# Entries that a program holds at once, the fastest of 256 to 8192 on an H200.
PACK_TILE = 2048
ADD_TILE = 512
PAIRS_TILE = 1024
MAX_BUCKET = 16384
"""The largest bucket that a program holds."""
BATCH = 8
"""Messages added per pass over the output."""


@triton.jit(do_not_specialize=["buckets", *KEYS])
def _pack_kernel(
    x_ptr, residual_ptr, residual_out_ptr, codes_ptr, scales_ptr, table_ptr, decay, numel, buckets,
    key_low, key_high, FEEDBACK: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    TOP: tl.constexpr, OVER: tl.constexpr, LEVELS: tl.constexpr, PER_BYTE: tl.constexpr,
    BUCKET: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SPAN)
    index = row[:, None] * BUCKET + column[None, :]
    inside = (column[None, :] < BUCKET) & (index < numel)
    total = tl.load(x_ptr + index, mask=inside, other=0.0)
    if FEEDBACK:
        total = tl.fma(tl.load(residual_ptr + index, mask=inside, other=0.0), decay, total)
    word = random_bits(index, key_low, key_high)
    code, scale = encode(total, word, table_ptr, KIND, SCALE, TOP, LEVELS)
    if OVER != 1.0:
        scale = tl.div_rn(scale, tl.full(scale.shape, OVER, tl.float32))
    tl.store(scales_ptr + row, scale, mask=row < buckets)
    if FEEDBACK:
        decoded = quantizer.decode(code, table_ptr, KIND, LEVELS) * scale[:, None]
        tl.store(residual_out_ptr + index, total - decoded, mask=inside)
    if PER_BYTE == 1:
        tl.store(codes_ptr + index, code.to(tl.uint8), mask=inside)
    else:
        parts = tl.reshape(tl.where(inside, code, 0), (ROWS, SPAN // PER_BYTE, PER_BYTE))
        shift = tl.arange(0, PER_BYTE) * (8 // PER_BYTE)
        packed = tl.sum(parts << shift[None, None, :], axis=2).to(tl.uint8)
        byte = tl.arange(0, SPAN // PER_BYTE)
        at = row[:, None] * (BUCKET // PER_BYTE) + byte[None, :]
        valid = (byte[None, :] * PER_BYTE < BUCKET) & (at * PER_BYTE < numel)
        tl.store(codes_ptr + at, packed, mask=valid)


@triton.jit
def _codes_at(row_ptr, start, numel, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the codes of BLOCK entries from `start` on, as int32."""
    local = tl.arange(0, BLOCK)
    inside = start + local < numel
    # A block begins at a whole byte. Only its start needs 64 bits.
    ptr = row_ptr + start // 8 * WIDTH
    if WIDTH == 8:
        code = tl.load(ptr + local, mask=inside, other=0).to(tl.int32)
    elif WIDTH == 4:
        byte = tl.arange(0, BLOCK // 2)
        pair = tl.load(ptr + byte, mask=start + byte * 2 < numel, other=0).to(tl.int32)
        code = tl.interleave(pair & 15, pair >> 4)
    else:
        first = local * WIDTH
        code = tl.load(ptr + first // 8, mask=inside, other=0).to(tl.int32) >> (first % 8)
        if 8 % WIDTH != 0:
            spills = inside & (first % 8 + WIDTH > 8)
            code |= tl.load(ptr + first // 8 + 1, mask=spills, other=0).to(tl.int32) << (
                8 - first % 8
            )
        code &= (1 << WIDTH) - 1
    return code


# Except `row_bytes`: where it is a multiple of 16, four codes are read at a time.
@triton.jit(do_not_specialize=["row_scales"])
def _add_kernel(
    out_ptr, codes_ptr, scales_ptr, table_ptr, row_bytes, row_scales, weight, numel,
    MESSAGES: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    local = tl.arange(0, BLOCK)
    inside = start + local < numel
    total = tl.load(out_ptr + start + local, mask=inside, other=0.0)
    bucket = (start % BUCKET + local).to(tl.int32) // BUCKET
    for message in tl.static_range(MESSAGES):
        code = _codes_at(codes_ptr + message * row_bytes, start, numel, WIDTH, BLOCK)
        row_ptr = scales_ptr + message * row_scales + start // BUCKET
        if BUCKET % BLOCK == 0:
            unit = tl.load(row_ptr) * weight
        else:
            unit = tl.load(row_ptr + bucket, mask=inside, other=0.0) * weight
        total += quantizer.decode(code, table_ptr, KIND, LEVELS) * unit
    tl.store(out_ptr + start + local, total, mask=inside)


@triton.jit(do_not_specialize=["row_bytes", "row_scales"])
def _add_pairs_kernel(
    out_ptr, codes_ptr, scales_ptr, table_ptr, row_bytes, row_scales, weight, numel,
    MESSAGES: tl.constexpr, KIND: tl.constexpr, LEVELS: tl.constexpr, BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds messages of two codes per byte, both of one bucket: a thread handles both."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    local = tl.arange(0, BLOCK)
    total = tl.load(out_ptr + start + local, mask=start + local < numel, other=0.0)
    first, second = tl.split(tl.reshape(total, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    inside = start + pair * 2 < numel
    bucket = (start % BUCKET + pair * 2).to(tl.int32) // BUCKET
    for message in tl.static_range(MESSAGES):
        byte = tl.load(codes_ptr + message * row_bytes + start // 2 + pair, mask=inside, other=0)
        row_ptr = scales_ptr + message * row_scales + start // BUCKET
        unit = tl.load(row_ptr + bucket, mask=inside, other=0.0) * weight
        code = byte.to(tl.int32)
        first += quantizer.decode(code & 15, table_ptr, KIND, LEVELS) * unit
        second += quantizer.decode(code >> 4, table_ptr, KIND, LEVELS) * unit
    total = tl.reshape(tl.join(first, second), (BLOCK,))
    tl.store(out_ptr + start + local, total, mask=start + local < numel)


@cache
def _tree(device: torch.device) -> Tensor:
    return torch.cat([tree(device).to(torch.float32), slopes(device)])


def _table(spec: RoundingSpec, like: Tensor) -> Tensor:
    """Returns the lookup table of the kernels; any tensor if they look nothing up."""
    return _tree(like.device) if spec.kind == "tree" else like


def _pack(
    x: Tensor,
    residual: Tensor,
    decay: float,
    residual_out: Tensor,
    spec: RoundingSpec,
    key: Key,
    feedback: bool,
) -> tuple[Tensor, Tensor]:
    numel, width, bucket = x.numel(), spec.width, spec.bucket
    buckets = -(-numel // bucket)
    # A byte must not hold entries of two buckets.
    per_byte = 8 // width if 8 % width == 0 and bucket % (8 // width) == 0 else 1
    codes = torch.empty(-(-numel // per_byte), dtype=torch.uint8, device=x.device)
    scales = torch.empty(buckets, device=x.device)
    span = max(triton.next_power_of_2(bucket), per_byte)
    rows = max(1, PACK_TILE // span)
    if numel:
        _pack_kernel[(-(-buckets // rows),)](
            x, residual, residual_out, codes, scales, _table(spec, x), decay, numel, buckets,
            *key_words(key), FEEDBACK=feedback, KIND=spec.kind, SCALE=spec.scale,
            TOP=spec.scaled_max, OVER=spec.scale_divisor, LEVELS=spec.levels, PER_BYTE=per_byte,
            BUCKET=bucket, SPAN=span, ROWS=rows,
            # A fused multiply-add rounds differently, so codes would differ from the reference.
            enable_fp_fusion=False,
        )  # fmt: skip
    return (codes if per_byte * width == 8 else pack_bits(codes, width)), scales


def round_pack(x: Tensor, spec: RoundingSpec, key: Key) -> tuple[Tensor, Tensor]:
    if spec.bucket > MAX_BUCKET:
        return reference.round_pack(x, spec, key)
    return _pack(x, x, 0.0, x, spec, key, feedback=False)


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, spec: RoundingSpec, key: Key
) -> tuple[Tensor, Tensor]:
    if spec.bucket > MAX_BUCKET:
        return reference.round_pack_sum(x, residual, decay, residual_out, spec, key)
    return _pack(x, residual, decay, residual_out, spec, key, feedback=True)


def round_add(
    out: Tensor, codes: Tensor, scales: Tensor, weight: float, spec: RoundingSpec
) -> None:
    check_out(out)
    numel = out.numel()
    for start in range(0, len(codes) if numel else 0, BATCH):
        batch, batch_scales = codes[start : start + BATCH], scales[start : start + BATCH]
        options = {
            "MESSAGES": len(batch), "KIND": spec.kind, "LEVELS": spec.levels, "BUCKET": spec.bucket,
            # A fused multiply-add rounds differently from the reference.
            "enable_fp_fusion": False,
        }  # fmt: skip
        arguments = (
            out,
            batch,
            batch_scales,
            _table(spec, out),
            batch.stride(0),
            batch_scales.stride(0),
            weight,
        )
        if spec.width == 4 and spec.bucket % 2 == 0:
            grid = (-(-numel // PAIRS_TILE),)
            _add_pairs_kernel[grid](*arguments, numel, BLOCK=PAIRS_TILE, **options)
        else:
            grid = (-(-numel // ADD_TILE),)
            _add_kernel[grid](*arguments, numel, WIDTH=spec.width, BLOCK=ADD_TILE, **options)
