"""Packed signs, and the sums of positive and negative entries over the whole tensor.

Two passes: the first adds the residual, packs and sums, with a fixed number of programs; in the
second every program adds up those few partial sums and subtracts the message.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
PROGRAMS = 1024
"""Programs of the first pass, at most; each yields one row of sums."""


@triton.jit
def pack_words(bits, WORDS: tl.constexpr):
    """Packs bits [WORDS * 32] into int32 words, lowest bit first."""
    rows = tl.reshape(bits.to(tl.int32), (WORDS, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def _pack_signs_kernel(
    x_ptr, residual_ptr, residual_out_ptr, words_ptr, sums_ptr, decay, numel,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # In float64, since sums of the largest float32 numbers overflow.
    low = tl.zeros((BLOCK,), tl.float64)
    high = tl.zeros((BLOCK,), tl.float64)
    negatives = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        index = start + tl.arange(0, BLOCK)
        inside = index < numel
        total = tl.load(x_ptr + index, mask=inside, other=0.0)
        if FEEDBACK:
            total = tl.fma(tl.load(residual_ptr + index, mask=inside, other=0.0), decay, total)
            tl.store(residual_out_ptr + index, total, mask=inside)
        # Both comparisons are false for NaN, so NaN is in both sums.
        low += tl.where(total >= 0, 0.0, total).to(tl.float64)
        high += tl.where(total < 0, 0.0, total).to(tl.float64)
        negatives += (total < 0).to(tl.int32)
        at = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(words_ptr + at, pack_words(total < 0, BLOCK // 32), mask=at * 32 < numel)
        start += tl.num_programs(0) * BLOCK
    row = sums_ptr + tl.program_id(0) * 3
    tl.store(row, tl.sum(low))
    tl.store(row + 1, tl.sum(high))
    tl.store(row + 2, tl.sum(negatives))


@triton.jit
def means(low, high, negatives, count, SYMMETRIC: tl.constexpr):
    """Returns the means of both signs from their sums; ± the mean magnitude if SYMMETRIC."""
    if SYMMETRIC:
        mean_high = ((high - low) / count).to(tl.float32)
        mean_low = -mean_high
    else:
        mean_low = (low / tl.maximum(negatives, 1.0)).to(tl.float32)
        mean_high = (high / tl.maximum(count - negatives, 1.0)).to(tl.float32)
    return mean_low, mean_high


@triton.jit(do_not_specialize=["programs"])
def _means_kernel(
    residual_out_ptr, sums_ptr, low_ptr, high_ptr, numel, programs,
    FEEDBACK: tl.constexpr, SYMMETRIC: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, PROGRAMS)
    part = sums_ptr + row * 3
    low = tl.sum(tl.load(part, mask=row < programs, other=0.0))
    high = tl.sum(tl.load(part + 1, mask=row < programs, other=0.0))
    negatives = tl.sum(tl.load(part + 2, mask=row < programs, other=0.0))
    mean_low, mean_high = means(
        low, high, negatives, tl.full((), 1.0, tl.float64) * numel, SYMMETRIC
    )
    if tl.program_id(0) == 0:
        tl.store(low_ptr, mean_low)
        tl.store(high_ptr, mean_high)
    if FEEDBACK:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < numel:
            index = start + tl.arange(0, BLOCK)
            total = tl.load(residual_out_ptr + index, mask=index < numel, other=0.0)
            total -= tl.where(total < 0, mean_low, mean_high)
            tl.store(residual_out_ptr + index, total, mask=index < numel)
            start += tl.num_programs(0) * BLOCK


def pack_signs(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, feedback: bool
) -> tuple[Tensor, Tensor]:
    """Returns packed signs of the sum (stored in `residual_out`) and each program's sums."""
    numel = x.numel()
    words = torch.empty(-(-numel // 32), dtype=torch.int32, device=x.device)
    programs = min(PROGRAMS, -(-numel // BLOCK))
    sums = torch.empty((programs, 3), dtype=torch.float64, device=x.device)
    if numel:
        _pack_signs_kernel[(programs,)](
            x, residual, residual_out, words, sums, decay, numel, FEEDBACK=feedback, BLOCK=BLOCK
        )
    return words.view(torch.uint8)[: -(-numel // 8)], sums


def sign_means(
    residual_out: Tensor, sums: Tensor, feedback: bool, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Returns the means of both signs; with feedback subtracts them from `residual_out`."""
    low, high = (
        torch.empty(1, device=residual_out.device),
        torch.empty(1, device=residual_out.device),
    )
    _means_kernel[(len(sums) if feedback else 1,)](
        residual_out, sums, low, high, residual_out.numel(), len(sums), FEEDBACK=feedback,
        SYMMETRIC=symmetric, PROGRAMS=PROGRAMS, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return low, high
