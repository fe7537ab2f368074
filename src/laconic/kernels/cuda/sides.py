"""Signs, one bit each, with a mean for each side of zero (kernels/reference/sides.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.sums import BLOCK, means, measure, settle
from laconic.kernels.door import check_out

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
    x: Tensor, residual: Tensor, decay: float, left: Tensor, bucket: int, feedback: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = measure(x, residual, decay, left, feedback)
    if 0 < x.numel() <= bucket:
        return bits, *settle(left, sums, feedback, even=False)
    buckets = -(-x.numel() // bucket)
    low, high = torch.empty(buckets, device=x.device), torch.empty(buckets, device=x.device)
    if buckets:
        _bucket_kernel[(buckets,)](
            left, low, high, x.numel(), BUCKET=bucket, FEEDBACK=feedback,
            BLOCK=min(BLOCK, triton.next_power_of_2(bucket)), enable_fp_fusion=False,
        )  # fmt: skip
    return bits, low, high


def sides_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    return _sides(x, x, 0.0, x, bucket, feedback=False)


def sides_pack_sum(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _sides(x, residual, decay, left, bucket, feedback=True)


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
