"""Guesses from a sample: about where the magnitude of some rank lies."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.passes import magnitude
from laconic.types import Given

GUESS = 4096
COARSE = 15
"""A guess has this many zero bits: it is within a 256th, and found in fewer steps."""


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
