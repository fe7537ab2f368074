"""Guesses from a sample: about where the magnitude of some rank lies, and exact ranks in it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.passes import finite, magnitude
from laconic.kernels.cuda.random import KEYS, halves, stratum
from laconic.types import Given

SAMPLE = 16384
"""Magnitudes that one program can rank."""

GUESS = 4096
COARSE = 15
"""A guess has this many zero bits: it is within a 256th, and found in fewer steps."""

BLOCK = 1024


@triton.jit(do_not_specialize=[*KEYS, "numel", "count"])
def _sample_kernel(
    x_ptr, residual_ptr, out_ptr, decay, numel, count, key_low, key_high, FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = stratum(i, numel, count, key_low, key_high)
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    tl.store(out_ptr + i, finite(magnitude(total)), mask=i < count)


@triton.jit
def _store_ranks(size, out_ptr, lower, upper, LOWEST: tl.constexpr):
    """out[0]: what `lower` of the sizes reach; out[1]: what fewer than `upper` do.

    Both are multiples of 2^LOWEST, as high and as low as possible.
    """
    one = tl.full((), 0, tl.int32)
    two = tl.full((), 0, tl.int32)
    for step in range(31 - LOWEST):
        bit = tl.full((), 1, tl.int32) << (30 - step)
        # Both counts in one sum: neither needs more than 15 bits.
        reach = (size >= one + bit).to(tl.int32) + ((size >= two + bit).to(tl.int32) << 16)
        both = tl.sum(reach)
        one = tl.where((both & 0xFFFF) >= lower, one + bit, one)
        two = tl.where((both >> 16) >= upper, two + bit, two)
    tl.store(out_ptr, one)
    # 2^31 would be negative.
    above = tl.minimum(two.to(tl.int64) + (1 << LOWEST), 0x7FFFFFFF).to(tl.int32)
    tl.store(out_ptr + 1, above)


@triton.jit(do_not_specialize=["count", "rank"])
def _rank_kernel(sample_ptr, out_ptr, count, rank, SPAN: tl.constexpr):
    i = tl.arange(0, SPAN)
    size = tl.load(sample_ptr + i, mask=i < count, other=-1)
    _store_ranks(size, out_ptr, rank, rank, 0)


@triton.jit(do_not_specialize=["stride", "count", "lower", "upper"])
def _guess_kernel(
    x_ptr, residual_ptr, out_ptr, decay, stride, count, lower, upper, FEEDBACK: tl.constexpr,
    LOWEST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Two borders around a rank, by a sample at equal distances."""
    i = tl.arange(0, SPAN)
    place = i.to(tl.int64) * stride
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    _store_ranks(tl.where(i < count, magnitude(total), -1), out_ptr, lower, upper, LOWEST)


def drawn(given: Given, key: int, tried: int) -> Tensor:
    """The magnitudes (bits) of `tried` entries of the sum, those that are not finite as zero."""
    x, residual, left, decay = given
    feedback = residual is not None and left is not None
    sample = torch.empty(tried, dtype=torch.int32, device=x.device)
    _sample_kernel[(-(-tried // BLOCK),)](
        x, x if residual is None else residual, sample, decay, x.numel(), tried, *halves(key),
        FEEDBACK=feedback, BLOCK=BLOCK,
    )  # fmt: skip
    return sample


def ranked(sample: Tensor, rank: int) -> Tensor:
    """The rank-th largest of at most SAMPLE magnitudes, and the next number."""
    out = torch.empty(2, dtype=torch.int32, device=sample.device)
    span = max(32, triton.next_power_of_2(sample.numel()))
    warps = min(32, max(1, span // 256))
    _rank_kernel[(1,)](sample, out, sample.numel(), rank, SPAN=span, num_warps=warps)
    return out


def guessed(given: Given, count: int) -> Tensor:
    """Two magnitudes (bits) that the count-th largest should be between."""
    x, residual, left, decay = given
    feedback = residual is not None and left is not None
    tried = min(x.numel(), GUESS)
    aim = count * tried / x.numel()
    room = 0.05 * aim + 4 * math.sqrt(aim)
    lower, upper = min(tried, math.ceil(aim + room) + 1), max(1, math.floor(aim - room))
    # Odd, so that the sample does not walk along a column of a matrix.
    stride = (x.numel() // tried - 1) | 1
    out = torch.empty(2, dtype=torch.int32, device=x.device)
    _guess_kernel[(1,)](
        x, x if residual is None else residual, out, decay, stride, tried, lower, upper,
        FEEDBACK=feedback, LOWEST=COARSE, SPAN=GUESS, num_warps=16,
    )  # fmt: skip
    return out
