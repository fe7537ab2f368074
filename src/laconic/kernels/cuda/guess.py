"""What is looked for, and a guess by a small sample from which magnitude on it lies."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.brackets import BINS, BRACKETS, GUESS, HEAD, ROWS
from laconic.kernels.cuda.passes import magnitude
from laconic.types import Given

SPAN = 2048
"""Entries that are looked at."""
CLEAR = 4096


class Search(NamedTuple):
    """What is looked for, and so which ranks must be known; 0 where a rank is not needed."""

    kind: str
    few: int = 0
    many: int = 0
    most: int = 0
    factor: int = 0
    """The bits of a float64."""
    rounds: int = 0
    top: int = 0
    """A rank in a larger sample."""
    rises: tuple[int, ...] = ()
    """What follows `factor`, as bits too, when a border rises by stages."""


@triton.jit(do_not_specialize=["stride", "count", "lower", "few", "many", "most", "top"])
def _guess_kernel(
    x_ptr, residual_ptr, state_ptr, decay, stride, count, lower, few, many, most, top,
    FEEDBACK: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Clears the state, and guesses where the brackets begin by a sample at equal distances."""
    for begin in range(0, SIZE, CLEAR):
        at = begin + tl.arange(0, CLEAR)
        tl.store(state_ptr + at, tl.zeros((CLEAR,), tl.int64), mask=at < SIZE)
    i = tl.arange(0, SPAN)
    place = i.to(tl.int64) * stride
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    size = tl.where(i < count, magnitude(total), -1)
    least = tl.full((), 0, tl.int32)
    # Four bits a step, the lowest 15 are not looked for.
    for step in range(4):
        unit = tl.full((), 1, tl.int32) << (27 - 4 * step)
        tries = least + tl.arange(0, 16) * unit
        reach = tl.sum((size[None, :] >= tries[:, None]).to(tl.int32), axis=1)
        least += (tl.sum((reach >= lower).to(tl.int32)) - 1) * unit
    least = tl.maximum(least, 1)
    tl.debug_barrier()
    for bracket in tl.static_range(4):
        if bracket == 0:
            rank = few
        elif bracket == 1:
            rank = many
        elif bracket == 2:
            rank = most
        else:
            rank = top
        ptr = state_ptr + BRACKETS + 4 * bracket
        asked = rank > 0
        # What is not asked for is closed, and no border is so low.
        tl.store(ptr, tl.where(asked, least, -1).to(tl.int64))
        tl.store(ptr + 1, tl.where(asked, 0x7FFFFFFF, -1).to(tl.int64))
        tl.store(ptr + 3, tl.full((), 0, tl.int64) + rank)
    # The guess stays here when brackets have moved.
    tl.store(state_ptr + GUESS, least.to(tl.int64))


def begun(given: Given, search: Search) -> Tensor:
    """A state with brackets that begin at a guess."""
    x, residual, left, decay = given
    feedback = residual is not None and left is not None
    tried = min(x.numel(), SPAN)
    aim = max(search.few, search.many, search.most) * tried / x.numel()
    lower = min(tried, math.ceil(1.05 * aim + 4 * math.sqrt(aim)) + 1)
    # Odd, so that the sample does not walk along a column of a matrix.
    stride = (x.numel() // tried - 1) | 1
    state = torch.empty(HEAD + ROWS * BINS, dtype=torch.int64, device=x.device)
    _guess_kernel[(1,)](
        x, x if residual is None else residual, state, decay, stride, tried, lower, search.few,
        search.many, search.most, search.top, FEEDBACK=feedback, SIZE=state.numel(), SPAN=SPAN,
        CLEAR=CLEAR, num_warps=8,
    )  # fmt: skip
    return state
