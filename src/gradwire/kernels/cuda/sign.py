"""Signs in one bit each, with means or as votes (definition: kernels/reference/sign.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, halves, word_at
from gradwire.kernels.cuda.sign_sums import BLOCK, PROGRAMS, means, measure, pack_words, settle
from gradwire.kernels.validation import check_out
from gradwire.types import Key

ADD_BLOCK = 2048
TOGETHER = 8
"""So many messages are added in one reading of the output."""


@triton.jit
def _bucket_kernel(
    x_ptr, low_ptr, high_ptr, numel, BUCKET: tl.constexpr,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One bucket a program: its means and, with feedback, what they leave of it."""
    first = tl.program_id(0).to(tl.int64) * BUCKET
    last = tl.minimum(first + BUCKET, numel)
    # Sums of the largest float32 numbers leave its range.
    low = tl.zeros((BLOCK,), tl.float64)
    high = tl.zeros((BLOCK,), tl.float64)
    below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BUCKET, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        total = tl.load(x_ptr + place, mask=place < last, other=0.0)
        low += tl.where(total >= 0, 0.0, total).to(tl.float64)
        high += tl.where(total < 0, 0.0, total).to(tl.float64)
        below += (total < 0).to(tl.int32)
    count = tl.full((), 1.0, tl.float64) * (last - first)
    sums = tl.sum(low), tl.sum(high), tl.sum(below)
    one, other = means(sums[0], sums[1], sums[2], count, False)
    tl.store(low_ptr + tl.program_id(0), one)
    tl.store(high_ptr + tl.program_id(0), other)
    if FEEDBACK:
        for start in range(0, BUCKET, BLOCK):
            place = first + start + tl.arange(0, BLOCK)
            total = tl.load(x_ptr + place, mask=place < last, other=0.0)
            total -= tl.where(total < 0, one, other)
            tl.store(x_ptr + place, total, mask=place < last)


@triton.jit(do_not_specialize=["row_bytes", "row_low", "row_high"])
def _add_kernel(
    out_ptr, bits_ptr, low_ptr, high_ptr, row_bytes, row_low, row_high, weight, numel,
    MESSAGES: tl.constexpr, BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BUCKET 0: one bucket for all."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Only the beginning of a block needs 64 bits.
    local = tl.arange(0, BLOCK)
    inside = start + local < numel
    total = tl.load(out_ptr + start + local, mask=inside, other=0.0)
    for message in tl.static_range(MESSAGES):
        ptr = bits_ptr + message * row_bytes + start // 8
        byte = tl.load(ptr + local // 8, mask=inside, other=0)
        negative = ((byte.to(tl.int32) >> (local % 8)) & 1) == 1
        one_ptr, other_ptr = low_ptr + message * row_low, high_ptr + message * row_high
        if BUCKET == 0:
            low, high = tl.load(one_ptr), tl.load(other_ptr)
        elif BUCKET % BLOCK == 0:
            low, high = tl.load(one_ptr + start // BUCKET), tl.load(other_ptr + start // BUCKET)
        else:
            bucket = (start + local) // BUCKET
            low = tl.load(one_ptr + bucket, mask=inside, other=0.0)
            high = tl.load(other_ptr + bucket, mask=inside, other=0.0)
        total += tl.where(negative, low * weight, high * weight)
    tl.store(out_ptr + start + local, total, mask=inside)


def _sides(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int, feedback: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = measure(x, residual, decay, residual_out, feedback)
    if 0 < x.numel() <= bucket:
        return bits, *settle(residual_out, sums, feedback, even=False)
    buckets = -(-x.numel() // bucket)
    low, high = torch.empty(buckets, device=x.device), torch.empty(buckets, device=x.device)
    if buckets:
        _bucket_kernel[(buckets,)](
            residual_out, low, high, x.numel(), BUCKET=bucket, FEEDBACK=feedback,
            BLOCK=min(BLOCK, triton.next_power_of_2(bucket)), enable_fp_fusion=False,
        )  # fmt: skip
    return bits, low, high


def sides_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    return _sides(x, x, 0.0, x, bucket, feedback=False)


def sides_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _sides(x, residual, decay, residual_out, bucket, feedback=True)


def sides_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    check_out(out)
    numel = out.numel()
    whole = numel <= bucket
    # Where blocks do not cross buckets, a block needs but one of each mean.
    even = bucket >= 512 and triton.next_power_of_2(bucket) == bucket
    block = min(ADD_BLOCK, bucket) if even and not whole else ADD_BLOCK
    for start in range(0, len(bits) if numel else 0, TOGETHER):
        some, one, other = (part[start : start + TOGETHER] for part in (bits, low, high))
        _add_kernel[(-(-numel // block),)](
            out, some, one, other, some.stride(0), one.stride(0), other.stride(0), weight, numel,
            MESSAGES=len(some), BUCKET=0 if whole else bucket, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = measure(x, x, 0.0, x, feedback=False)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, settle(x, sums, feedback=False, even=True)[1]


def sign_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor
) -> tuple[Tensor, Tensor]:
    bits, sums = measure(x, residual, decay, residual_out, feedback=True)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, settle(residual_out, sums, feedback=True, even=True)[1]


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    sides_add(out, bits, -scales, scales, weight, max(1, out.numel()))


@triton.jit(do_not_specialize=KEYS)
def _votes_kernel(
    x_ptr, words_ptr, say_ptr, numel, key_low, key_high, BLOCK: tl.constexpr
):  # fmt: skip
    largest = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < numel, other=1.0)
        at = start // 32 + tl.arange(0, BLOCK // 32)
        coins = word_at(at, key_low, key_high).to(tl.int32, bitcast=True)
        words = pack_words(x < 0, BLOCK // 32) | (pack_words(x == 0, BLOCK // 32) & coins)
        tl.store(words_ptr + at, words, mask=at * 32 < numel)
        bits = tl.where(place < numel, tl.abs(x).to(tl.int32, bitcast=True), 0)
        largest = tl.maximum(largest, bits)
        start += tl.num_programs(0) * BLOCK
    # The bits of 0, 1 and NaN, which ascend.
    peak = tl.max(largest)
    say = tl.where(peak >= 0x7F800000, 0x7FC00000, tl.where(peak > 0, 0x3F800000, 0))
    tl.atomic_max(say_ptr, say)


def votes_pack(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    words = torch.empty(-(-numel // 32), dtype=torch.int32, device=x.device)
    say = torch.zeros(1, dtype=torch.int32, device=x.device)
    blocks = -(-numel // BLOCK)
    programs = min(PROGRAMS, blocks)
    if numel:
        _votes_kernel[(programs,)](x, words, say, numel, *halves(key), BLOCK=BLOCK)
    return words.view(torch.uint8)[: -(-numel // 8)], say.view(torch.float32)
