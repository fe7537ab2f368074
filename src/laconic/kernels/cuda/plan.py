"""Where each program writes what it tells: after what those before it do."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.brackets import CUT
from laconic.kernels.cuda.early import follows, in_turn
from laconic.kernels.cuda.passes import span

PLAN = tl.constexpr(4)
"""Numbers of a plan before those of each program."""


@triton.jit
def _form(count, numel):
    """Width of the low bits of positions, and where they begin (the format: wire/indices.py)."""
    gap = numel // tl.maximum(count, 1)
    low = tl.full((), 0, tl.int64)
    while (gap >> (low + 1)) > 0:
        low += 1
    bits = count + ((numel - 1) >> low) + 1
    return low, (bits + 7) // 8 * 8


@triton.jit
def plan(
    state_ptr, counts_ptr, ties_ptr, plan_ptr, count_ptr, numel, programs, most,
    CUTS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How many are chosen before each program, and are on the border; then what all must know.

    Where nothing is cut, none counts as on the border. What comes out is how many are chosen.
    """
    other = tl.arange(0, SPAN)
    here = other < programs
    above = tl.load(counts_ptr + other, mask=here, other=0).to(tl.int64)
    count = tl.sum(above)
    before = tl.cumsum(above, 0) - above
    wanted = tl.full((), 1 << 62, tl.int64)
    if CUTS:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if tl.load(state_ptr + CUT) != 0:
            # Of the equal ones the first are chosen.
            wanted = most - count
            ties = tl.load(ties_ptr + other, mask=here, other=0).to(tl.int64)
            equal = tl.cumsum(ties, 0) - ties
            before += tl.minimum(equal, wanted)
            count += tl.minimum(tl.sum(ties), wanted)
            tl.store(plan_ptr + PLAN + programs + other, equal, mask=here)
    tl.store(plan_ptr + PLAN + other, before, mask=here)
    low, base = _form(count, tl.full((), 0, tl.int64) + numel)
    tl.store(plan_ptr, low)
    tl.store(plan_ptr + 1, base)
    tl.store(plan_ptr + 2, wanted)
    tl.store(count_ptr, count.to(tl.int32))
    return count


@triton.jit(do_not_specialize=["numel", "programs"])
def _plan_kernel(
    counts_ptr, plan_ptr, count_ptr, numel, programs, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    plan(
        counts_ptr, counts_ptr, counts_ptr, plan_ptr, count_ptr, numel, programs, 0, False, SPAN
    )  # fmt: skip


def new_plan(programs: int, device: torch.device) -> Tensor:
    return torch.empty(PLAN.value + 2 * programs, dtype=torch.int64, device=device)


def planned(counts: Tensor, count: Tensor, numel: int) -> Tensor:
    """The plan where all that is marked is told; how many that are goes to `count`."""
    programs = counts.numel()
    said = new_plan(programs, counts.device)
    _plan_kernel[(1,)](
        counts, said, count, numel, programs, SPAN=span(programs), num_warps=8, **follows(counts)
    )
    return said
