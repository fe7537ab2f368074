"""Signs in one bit each, with means or as votes (definition: kernels/reference/sign.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, key_words, random_bits
from gradwire.kernels.cuda.sign_sums import (
    BLOCK,
    PROGRAMS,
    means,
    pack_signs,
    pack_words,
    sign_means,
)
from gradwire.kernels.validation import check_out
from gradwire.types import Key

ADD_BLOCK = 2048
BATCH = 8
"""Messages added per pass over the output."""


@triton.jit
def _bucket_kernel(
    x_ptr, low_ptr, high_ptr, numel, BUCKET: tl.constexpr,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the means of one bucket and, with feedback, subtracts them."""
    first = tl.program_id(0).to(tl.int64) * BUCKET
    last = tl.minimum(first + BUCKET, numel)
    # In float64, since sums of the largest float32 numbers overflow.
    low = tl.zeros((BLOCK,), tl.float64)
    high = tl.zeros((BLOCK,), tl.float64)
    below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BUCKET, BLOCK):
        index = first + start + tl.arange(0, BLOCK)
        total = tl.load(x_ptr + index, mask=index < last, other=0.0)
        low += tl.where(total >= 0, 0.0, total).to(tl.float64)
        high += tl.where(total < 0, 0.0, total).to(tl.float64)
        below += (total < 0).to(tl.int32)
    count = tl.full((), 1.0, tl.float64) * (last - first)
    sums = tl.sum(low), tl.sum(high), tl.sum(below)
    mean_low, mean_high = means(sums[0], sums[1], sums[2], count, False)
    tl.store(low_ptr + tl.program_id(0), mean_low)
    tl.store(high_ptr + tl.program_id(0), mean_high)
    if FEEDBACK:
        for start in range(0, BUCKET, BLOCK):
            index = first + start + tl.arange(0, BLOCK)
            total = tl.load(x_ptr + index, mask=index < last, other=0.0)
            total -= tl.where(total < 0, mean_low, mean_high)
            tl.store(x_ptr + index, total, mask=index < last)


@triton.jit(do_not_specialize=["row_bytes", "row_low", "row_high"])
def _add_kernel(
    out_ptr, bits_ptr, low_ptr, high_ptr, row_bytes, row_low, row_high, weight, numel,
    MESSAGES: tl.constexpr, BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds messages; BUCKET is 0 if there is one bucket only."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Only the start of a block needs 64 bits.
    local = tl.arange(0, BLOCK)
    inside = start + local < numel
    total = tl.load(out_ptr + start + local, mask=inside, other=0.0)
    for message in tl.static_range(MESSAGES):
        ptr = bits_ptr + message * row_bytes + start // 8
        byte = tl.load(ptr + local // 8, mask=inside, other=0)
        negative = ((byte.to(tl.int32) >> (local % 8)) & 1) == 1
        row_low_ptr, row_high_ptr = low_ptr + message * row_low, high_ptr + message * row_high
        if BUCKET == 0:
            low, high = tl.load(row_low_ptr), tl.load(row_high_ptr)
        elif BUCKET % BLOCK == 0:
            low, high = (
                tl.load(row_low_ptr + start // BUCKET),
                tl.load(row_high_ptr + start // BUCKET),
            )
        else:
            bucket = (start + local) // BUCKET
            low = tl.load(row_low_ptr + bucket, mask=inside, other=0.0)
            high = tl.load(row_high_ptr + bucket, mask=inside, other=0.0)
        total += tl.where(negative, low * weight, high * weight)
    tl.store(out_ptr + start + local, total, mask=inside)


def _sign_means(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int, feedback: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = pack_signs(x, residual, decay, residual_out, feedback)
    if 0 < x.numel() <= bucket:
        return bits, *sign_means(residual_out, sums, feedback, symmetric=False)
    buckets = -(-x.numel() // bucket)
    low, high = torch.empty(buckets, device=x.device), torch.empty(buckets, device=x.device)
    if buckets:
        _bucket_kernel[(buckets,)](
            residual_out, low, high, x.numel(), BUCKET=bucket, FEEDBACK=feedback,
            BLOCK=min(BLOCK, triton.next_power_of_2(bucket)), enable_fp_fusion=False,
        )  # fmt: skip
    return bits, low, high


def sign_means_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    return _sign_means(x, x, 0.0, x, bucket, feedback=False)


def sign_means_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _sign_means(x, residual, decay, residual_out, bucket, feedback=True)


def sign_means_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    check_out(out)
    numel = out.numel()
    one_bucket = numel <= bucket
    # Blocks that do not cross buckets need one mean per sign.
    aligned = bucket >= 512 and triton.next_power_of_2(bucket) == bucket
    block = min(ADD_BLOCK, bucket) if aligned and not one_bucket else ADD_BLOCK
    for start in range(0, len(bits) if numel else 0, BATCH):
        batch, batch_low, batch_high = (part[start : start + BATCH] for part in (bits, low, high))
        _add_kernel[(-(-numel // block),)](
            out, batch, batch_low, batch_high, batch.stride(0), batch_low.stride(0),
            batch_high.stride(0), weight, numel, MESSAGES=len(batch),
            BUCKET=0 if one_bucket else bucket, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = pack_signs(x, x, 0.0, x, feedback=False)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, sign_means(x, sums, feedback=False, symmetric=True)[1]


def sign_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor
) -> tuple[Tensor, Tensor]:
    bits, sums = pack_signs(x, residual, decay, residual_out, feedback=True)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, sign_means(residual_out, sums, feedback=True, symmetric=True)[1]


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    sign_means_add(out, bits, -scales, scales, weight, max(1, out.numel()))


@triton.jit(do_not_specialize=KEYS)
def _votes_kernel(
    x_ptr, words_ptr, flag_ptr, numel, key_low, key_high, BLOCK: tl.constexpr
):  # fmt: skip
    largest = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < numel, other=1.0)
        word_index = start // 32 + tl.arange(0, BLOCK // 32)
        coins = random_bits(word_index, key_low, key_high).to(tl.int32, bitcast=True)
        words = pack_words(x < 0, BLOCK // 32) | (pack_words(x == 0, BLOCK // 32) & coins)
        tl.store(words_ptr + word_index, words, mask=word_index * 32 < numel)
        bits = tl.where(index < numel, tl.abs(x).to(tl.int32, bitcast=True), 0)
        largest = tl.maximum(largest, bits)
        start += tl.num_programs(0) * BLOCK
    # The bits of 0, 1 and NaN, in ascending order.
    peak = tl.max(largest)
    flag = tl.where(peak >= 0x7F800000, 0x7FC00000, tl.where(peak > 0, 0x3F800000, 0))
    tl.atomic_max(flag_ptr, flag)


def sign_votes_pack(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    words = torch.empty(-(-numel // 32), dtype=torch.int32, device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    blocks = -(-numel // BLOCK)
    programs = min(PROGRAMS, blocks)
    if numel:
        _votes_kernel[(programs,)](x, words, flag, numel, *key_words(key), BLOCK=BLOCK)
    return words.view(torch.uint8)[: -(-numel // 8)], flag.view(torch.float32)
