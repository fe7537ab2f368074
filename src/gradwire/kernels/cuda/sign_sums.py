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
"""Of the first pass, at most: each leaves one row of sums."""


@triton.jit
def pack_words(bits, WORDS: tl.constexpr):
    """Bits [WORDS * 32] as int32 words, the first lowest."""
    rows = tl.reshape(bits.to(tl.int32), (WORDS, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def _measure_kernel(
    x_ptr, residual_ptr, left_ptr, words_ptr, sums_ptr, decay, numel,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Sums of the largest float32 numbers leave its range.
    low = tl.zeros((BLOCK,), tl.float64)
    high = tl.zeros((BLOCK,), tl.float64)
    below = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        place = start + tl.arange(0, BLOCK)
        inside = place < numel
        total = tl.load(x_ptr + place, mask=inside, other=0.0)
        if FEEDBACK:
            total = tl.fma(tl.load(residual_ptr + place, mask=inside, other=0.0), decay, total)
            tl.store(left_ptr + place, total, mask=inside)
        # Both comparisons are false for NaN, so it is in both sums.
        low += tl.where(total >= 0, 0.0, total).to(tl.float64)
        high += tl.where(total < 0, 0.0, total).to(tl.float64)
        below += (total < 0).to(tl.int32)
        at = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(words_ptr + at, pack_words(total < 0, BLOCK // 32), mask=at * 32 < numel)
        start += tl.num_programs(0) * BLOCK
    row = sums_ptr + tl.program_id(0) * 3
    tl.store(row, tl.sum(low))
    tl.store(row + 1, tl.sum(high))
    tl.store(row + 2, tl.sum(below))


@triton.jit
def means(low, high, below, count, EVEN: tl.constexpr):
    """The means of two sides from their sums; EVEN: of all magnitudes, once with either sign."""
    if EVEN:
        above = ((high - low) / count).to(tl.float32)
        mean = -above
    else:
        mean = (low / tl.maximum(below, 1.0)).to(tl.float32)
        above = (high / tl.maximum(count - below, 1.0)).to(tl.float32)
    return mean, above


@triton.jit(do_not_specialize=["programs"])
def _settle_kernel(
    left_ptr, sums_ptr, low_ptr, high_ptr, numel, programs,
    FEEDBACK: tl.constexpr, EVEN: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, PROGRAMS)
    part = sums_ptr + row * 3
    low = tl.sum(tl.load(part, mask=row < programs, other=0.0))
    high = tl.sum(tl.load(part + 1, mask=row < programs, other=0.0))
    below = tl.sum(tl.load(part + 2, mask=row < programs, other=0.0))
    one, other = means(low, high, below, tl.full((), 1.0, tl.float64) * numel, EVEN)
    if tl.program_id(0) == 0:
        tl.store(low_ptr, one)
        tl.store(high_ptr, other)
    if FEEDBACK:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < numel:
            place = start + tl.arange(0, BLOCK)
            total = tl.load(left_ptr + place, mask=place < numel, other=0.0)
            total -= tl.where(total < 0, one, other)
            tl.store(left_ptr + place, total, mask=place < numel)
            start += tl.num_programs(0) * BLOCK


def measure(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, feedback: bool
) -> tuple[Tensor, Tensor]:
    """The packed signs of x (+ decay * residual, kept in `residual_out`), and each program's sums."""
    numel = x.numel()
    words = torch.empty(-(-numel // 32), dtype=torch.int32, device=x.device)
    programs = min(PROGRAMS, -(-numel // BLOCK))
    sums = torch.empty((programs, 3), dtype=torch.float64, device=x.device)
    if numel:
        _measure_kernel[(programs,)](
            x, residual, residual_out, words, sums, decay, numel, FEEDBACK=feedback, BLOCK=BLOCK
        )
    return words.view(torch.uint8)[: -(-numel // 8)], sums


def settle(residual_out: Tensor, sums: Tensor, feedback: bool, even: bool) -> tuple[Tensor, Tensor]:
    """The means of both sides; with feedback `residual_out` loses what they say."""
    low, high = (
        torch.empty(1, device=residual_out.device),
        torch.empty(1, device=residual_out.device),
    )
    _settle_kernel[(len(sums) if feedback else 1,)](
        residual_out, sums, low, high, residual_out.numel(), len(sums),
        FEEDBACK=feedback, EVEN=even, PROGRAMS=PROGRAMS, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return low, high
