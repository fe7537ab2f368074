"""Borders that rise by stages: each is fitted to what lies above the one before."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.brackets import BORDER, EXACT, is_last
from laconic.kernels.cuda.decide import double, note, sum_of, top_of
from laconic.kernels.cuda.early import follows, in_turn
from laconic.kernels.cuda.guess import Search
from laconic.kernels.cuda.passes import TILE, finite, magnitude, span, spread

HEIGHT = 4
FIRST_LAUNCH = 8


@triton.jit(do_not_specialize=["rise", "launch"])
def _excess_kernel(
    x_ptr, state_ptr, sums_ptr, counts_ptr, tops_ptr, numel, rise, launch, HEIGHT: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The border rises by `rise` mean excesses of those that reach it."""
    in_turn(EARLY)
    programs = tl.num_programs(0)
    # Every other pass goes backwards: it begins with what the one before has left in the cache.
    program = tl.where(launch % 2 == 0, programs - 1 - tl.program_id(0), tl.program_id(0))
    row, lane = tl.arange(0, HEIGHT), tl.arange(0, TILE // HEIGHT)
    start = program.to(tl.int64) * TILES * TILE
    border = tl.load(state_ptr + BORDER).to(tl.int32).to(tl.float32, bitcast=True)
    sums = tl.zeros((TILE // HEIGHT,), tl.float64)
    reach = tl.zeros((TILE // HEIGHT,), tl.int32)
    for tile in range(TILES):
        place = start + tile * TILE + row[:, None] * (TILE // HEIGHT) + lane[None, :]
        inside = place < numel
        total = tl.load(x_ptr + place, mask=inside, other=0.0)
        size = finite(magnitude(total)).to(tl.float32, bitcast=True)
        sums += tl.sum(tl.where(size > border, size - border, 0.0).to(tl.float64), axis=0)
        reach += tl.sum((inside & (size >= border)).to(tl.int32), axis=0)
    tl.store(sums_ptr + program, tl.sum(sums))
    tl.store(counts_ptr + program, tl.sum(reach))
    if is_last(state_ptr, launch):
        over = sum_of(sums_ptr, programs, SPAN) / sum_of(counts_ptr, programs, SPAN)
        exact = double(tl.load(state_ptr + EXACT)) + over * double(rise)
        note(state_ptr, tl.minimum(exact, top_of(tops_ptr, programs, SPAN)))


def climb(x: Tensor, search: Search, state: Tensor, tops: Tensor) -> None:
    """Lets the border in the state rise as often as is asked for."""
    programs, tiles = spread(x.numel())
    sums = torch.empty(programs if search.rises else 0, dtype=torch.float64, device=x.device)
    counts = torch.empty_like(tops)
    for number, rise in enumerate(search.rises):
        _excess_kernel[(programs,)](
            x, state, sums, counts, tops, x.numel(), rise, FIRST_LAUNCH + number,
            HEIGHT=HEIGHT, TILES=tiles, TILE=TILE, SPAN=span(programs),
            num_warps=8, **follows(x),
        )  # fmt: skip
