"""Search parameters, and a lower bound of the threshold from a small sample."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.threshold.dependent_launch import first_options, wait_for_previous
from gradwire.kernels.cuda.threshold.histogram import (
    FINE_ROWS,
    HEADER,
    INTERVALS,
    SAMPLED_BOUND,
    STATE_SIZE,
    is_last,
)
from gradwire.kernels.cuda.threshold.passes import grid_of, magnitude
from gradwire.kernels.cuda.threshold.spill_buffer import predict_bounds, uses_spill_buffer
from gradwire.types import EFInput, Key

BLOCK = 2048
BLOCKS = 4
"""Entries that a program samples, and programs that do so if the tensor is large."""
LARGE = 1 << 22
LAUNCH = tl.constexpr(4)


class Search(NamedTuple):
    """The kind of search and the ranks that it must know; 0 if a rank is not needed."""

    kind: str
    lower_rank: int = 0
    upper_rank: int = 0
    limit_rank: int = 0
    factor: int = 0
    """The bits of a float64."""
    rounds: int = 0
    key: Key = 0
    sample_size: int = 0
    sample_rank: int = 0
    """Key and size of a larger sample, and a rank in it."""
    stage_factors: tuple[int, ...] = ()
    """The factors of later stages after `factor`, as bits too, if the threshold rises by stages."""


@triton.jit
def _bound_of_rank(size, bound_rank, STEPS: tl.constexpr, STEP: tl.constexpr):
    """Returns a magnitude that about `bound_rank` sizes reach; only its highest bits are set."""
    least = tl.full((), 0, tl.int32)
    for step in range(STEPS):
        unit = tl.full((), 1, tl.int32) << (31 - STEP * (step + 1))
        candidates = least + tl.arange(0, 1 << STEP) * unit
        reach = tl.sum((size[None, :] >= candidates[:, None]).to(tl.int32), axis=1)
        least += (tl.sum((reach >= bound_rank).to(tl.int32)) - 1) * unit
    # Non-finite entries are never below it.
    return tl.minimum(tl.maximum(least, 1), 0x7F800000)


@triton.jit
def _open_intervals(state_ptr, least, lower_rank, upper_rank, limit_rank, sample_rank):
    """Opens intervals from `least` on for the ranks that are needed."""
    for interval in tl.static_range(4):
        if interval == 0:
            rank = lower_rank
        elif interval == 1:
            rank = upper_rank
        elif interval == 2:
            rank = limit_rank
        else:
            rank = sample_rank
        ptr = state_ptr + INTERVALS + 4 * interval
        needed = rank > 0
        # Intervals that are not needed are closed, below all thresholds.
        tl.store(ptr, tl.where(needed, least, -1).to(tl.int64))
        tl.store(ptr + 1, tl.where(needed, 0x7FFFFFFF, -1).to(tl.int64))
        tl.store(ptr + 3, tl.full((), 0, tl.int64) + rank)
    # The bound stays here when the intervals have been narrowed.
    tl.store(state_ptr + SAMPLED_BOUND, least.to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "stride", "count", "bound_rank", "lower_rank", "upper_rank", "limit_rank", "sample_rank",
        "factor", "stage_factor",
    ]
)  # fmt: skip
def _sample_bound_kernel(
    x_ptr, residual_ptr, state_ptr, sizes_ptr, decay, stride, count, bound_rank, lower_rank,
    upper_rank, limit_rank, sample_rank, factor, stage_factor, PREDICT: tl.constexpr,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the lower end of the intervals from a sample at equal distances.

    A single program clears the state itself, except for what the next pass clears.
    """
    wait_for_previous(PDL)
    if BLOCKS == 1:
        for begin in range(0, FINE_ROWS, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(state_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=at < FINE_ROWS)
        tl.debug_barrier()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = i.to(tl.int64) * stride
    total = tl.load(x_ptr + index, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + index, mask=i < count, other=0.0)
    size = tl.where(i < count, magnitude(total), -1)
    if BLOCKS == 1:
        _open_intervals(
            state_ptr, _bound_of_rank(size, bound_rank, 3, 4), lower_rank, upper_rank, limit_rank,
            sample_rank,
        )  # fmt: skip
        if PREDICT:
            predict_bounds(state_ptr, size, factor, stage_factor)
    else:
        tl.store(sizes_ptr + i, size)
        if is_last(state_ptr, LAUNCH):
            sizes = tl.load(sizes_ptr + tl.arange(0, BLOCK * BLOCKS))
            _open_intervals(
                state_ptr, _bound_of_rank(sizes, bound_rank, 8, 2), lower_rank, upper_rank,
                limit_rank, sample_rank,
            )  # fmt: skip
            if PREDICT:
                predict_bounds(state_ptr, sizes, factor, stage_factor)


def uses_sample(search: Search, numel: int) -> bool:
    """Returns whether a sample pays off: small tensors can be marked with the final threshold."""
    return search.kind != "excess" or grid_of(numel)[1] > 1


def initial_state(ef: EFInput, search: Search) -> Tensor:
    """Returns a state whose intervals begin at the sampled bound, if there is one."""
    x, residual, residual_out, decay = ef
    if not uses_sample(search, x.numel()):
        state = torch.empty(STATE_SIZE.value, dtype=torch.int64, device=x.device)
        state[: HEADER.value].zero_()
        return state
    feedback = residual is not None and residual_out is not None
    blocks = BLOCKS if x.numel() >= LARGE else 1
    sample_size = min(x.numel(), BLOCK * blocks)
    expected = (
        max(search.lower_rank, search.upper_rank, search.limit_rank) * sample_size / x.numel()
    )
    bound_rank = min(sample_size, math.ceil(1.05 * expected + 4 * math.sqrt(expected)) + 1)
    # Odd, so that the sample does not follow a column of a matrix.
    stride = (x.numel() // sample_size - 1) | 1
    # Several programs need a cleared state, to know which of them is the last.
    allocate = torch.empty if blocks == 1 else torch.zeros
    state = allocate(STATE_SIZE.value, dtype=torch.int64, device=x.device)
    sizes = torch.empty(BLOCK * blocks, dtype=torch.int32, device=x.device)
    _sample_bound_kernel[(blocks,)](
        x, x if residual is None else residual, state, sizes, decay, stride, sample_size,
        bound_rank, search.lower_rank, search.upper_rank, search.limit_rank, search.sample_rank,
        search.factor, sum(search.stage_factors[:1]),
        PREDICT=uses_spill_buffer(search.stage_factors, x.numel()), FEEDBACK=feedback, BLOCK=BLOCK,
        BLOCKS=blocks, num_warps=8, **first_options(x),
    )  # fmt: skip
    return state
