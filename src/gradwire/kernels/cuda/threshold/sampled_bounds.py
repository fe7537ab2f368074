"""Search parameters, and a lower bound of the threshold from a small sample."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.dependent_launch import in_turn, leads
from gradwire.kernels.cuda.threshold.histogram import BRACKETS, GUESS, HEAD, ROWS, SIZE, is_last
from gradwire.kernels.cuda.threshold.passes import magnitude, spread
from gradwire.kernels.cuda.threshold.spill_buffer import foresee, is_foreseen
from gradwire.types import EFInput, Key

BLOCK = 2048
BLOCKS = 4
"""A program looks at so many entries, and so many programs do where a tensor is large."""
LARGE = 1 << 22
LAUNCH = tl.constexpr(4)


class Search(NamedTuple):
    """What is looked for, and so which ranks must be known; 0 where a rank is not needed."""

    kind: str
    few: int = 0
    many: int = 0
    most: int = 0
    factor: int = 0
    """The bits of a float64."""
    rounds: int = 0
    key: Key = 0
    tried: int = 0
    top: int = 0
    """How a larger sample is drawn, its length, and a rank in it."""
    rises: tuple[int, ...] = ()
    """What follows `factor`, as bits too, when a border rises by stages."""


@triton.jit
def _rank(size, lower, STEPS: tl.constexpr, STEP: tl.constexpr):
    """A magnitude that about `lower` of the sizes reach: only its highest bits are looked for."""
    least = tl.full((), 0, tl.int32)
    for step in range(STEPS):
        unit = tl.full((), 1, tl.int32) << (31 - STEP * (step + 1))
        tries = least + tl.arange(0, 1 << STEP) * unit
        reach = tl.sum((size[None, :] >= tries[:, None]).to(tl.int32), axis=1)
        least += (tl.sum((reach >= lower).to(tl.int32)) - 1) * unit
    # What is not finite is never below it.
    return tl.minimum(tl.maximum(least, 1), 0x7F800000)


@triton.jit
def _open(state_ptr, least, few, many, most, top):
    """Brackets from `least` on for the ranks that are asked for."""
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


@triton.jit(
    do_not_specialize=[
        "stride", "count", "lower", "few", "many", "most", "top", "factor", "rise",
    ]
)  # fmt: skip
def _guess_kernel(
    x_ptr, residual_ptr, state_ptr, sizes_ptr, decay, stride, count, lower, few, many, most, top,
    factor, rise, FORESEEN: tl.constexpr, FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Guesses where the brackets begin by a sample at equal distances.

    One program clears the state itself, but for what the next pass clears.
    """
    in_turn(EARLY)
    if BLOCKS == 1:
        for begin in range(0, ROWS, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(state_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=at < ROWS)
        tl.debug_barrier()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = i.to(tl.int64) * stride
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    size = tl.where(i < count, magnitude(total), -1)
    if BLOCKS == 1:
        _open(state_ptr, _rank(size, lower, 3, 4), few, many, most, top)
        if FORESEEN:
            foresee(state_ptr, size, factor, rise)
    else:
        tl.store(sizes_ptr + i, size)
        if is_last(state_ptr, LAUNCH):
            sizes = tl.load(sizes_ptr + tl.arange(0, BLOCK * BLOCKS))
            _open(state_ptr, _rank(sizes, lower, 8, 2), few, many, most, top)
            if FORESEEN:
                foresee(state_ptr, sizes, factor, rise)


def is_guessed(search: Search, numel: int) -> bool:
    """Whether a guess pays: not where a small tensor can as well be marked when all is known."""
    return search.kind != "excess" or spread(numel)[1] > 1


def begun(given: EFInput, search: Search) -> Tensor:
    """A state with brackets that begin at a guess, if there is one."""
    x, residual, residual_out, decay = given
    if not is_guessed(search, x.numel()):
        state = torch.empty(SIZE.value, dtype=torch.int64, device=x.device)
        state[: HEAD.value].zero_()
        return state
    feedback = residual is not None and residual_out is not None
    blocks = BLOCKS if x.numel() >= LARGE else 1
    tried = min(x.numel(), BLOCK * blocks)
    aim = max(search.few, search.many, search.most) * tried / x.numel()
    lower = min(tried, math.ceil(1.05 * aim + 4 * math.sqrt(aim)) + 1)
    # Odd, so that the sample does not walk along a column of a matrix.
    stride = (x.numel() // tried - 1) | 1
    # Several programs must find it cleared, to know which is the last of them.
    new = torch.empty if blocks == 1 else torch.zeros
    state = new(SIZE.value, dtype=torch.int64, device=x.device)
    sizes = torch.empty(BLOCK * blocks, dtype=torch.int32, device=x.device)
    _guess_kernel[(blocks,)](
        x, x if residual is None else residual, state, sizes, decay, stride, tried, lower,
        search.few, search.many, search.most, search.top, search.factor, sum(search.rises[:1]),
        FORESEEN=is_foreseen(search.rises, x.numel()), FEEDBACK=feedback, BLOCK=BLOCK,
        BLOCKS=blocks, num_warps=8, **leads(x),
    )  # fmt: skip
    return state
