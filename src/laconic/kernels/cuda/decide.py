"""What a pass has counted, and so what the next one counts: kernels of one program.

Their steps are those of kernels/reference/borders.py, in float64, and their borders float32.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(value):
    """A float64 as the bits of the nearest float32."""
    return value.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _sum_of(sums_ptr, programs, SPAN: tl.constexpr):
    i = tl.arange(0, SPAN)
    return tl.sum(tl.load(sums_ptr + i, mask=i < programs, other=0).to(tl.float64))


@triton.jit
def _top_of(tops_ptr, programs, SPAN: tl.constexpr):
    """The largest magnitude as float64."""
    i = tl.arange(0, SPAN)
    top = tl.max(tl.load(tops_ptr + i, mask=i < programs, other=0), 0)
    return top.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _turn(node, step):
    """Whether the way to a node goes right at its step number `step`, and whether it goes on."""
    depth = (node >= 2).to(tl.int32) + (node >= 4).to(tl.int32)
    return ((node >> tl.maximum(depth - 1 - step, 0)) & 1) == 1, step < depth


@triton.jit
def ladder_kernel(start_ptr, borders_ptr, STEPS: tl.constexpr, NODES: tl.constexpr):
    """The borders that lowering can come to: 0.8^i of the first."""
    i = tl.arange(0, NODES)
    border = tl.load(start_ptr).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    border += tl.zeros((NODES,), tl.float64)
    for step in range(STEPS):
        border = tl.where(step < i, border * 0.8, border)
    tl.store(borders_ptr + i, _rounded(border))


@triton.jit
def settle_kernel(
    borders_ptr, counts_ptr, out_ptr, enough, STEPS: tl.constexpr, NODES: tl.constexpr
):  # fmt: skip
    """The first border that `enough` reach; the last where none is."""
    i = tl.arange(0, NODES)
    few = (tl.load(counts_ptr + i) < enough) & (i < STEPS)
    tl.store(out_ptr, tl.load(borders_ptr + tl.sum(few.to(tl.int32))))


@triton.jit(do_not_specialize=["levels"])
def bisect_kernel(
    sums_ptr, tops_ptr, counts_ptr, state_ptr, borders_ptr, out_ptr, numel, count, programs, levels,
    FIRST: tl.constexpr, LEVELS: tl.constexpr, NODES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """state = low, high, whether `low` is what was looked for."""
    if FIRST:
        high = _top_of(tops_ptr, programs, SPAN)
        low = tl.minimum(_sum_of(sums_ptr, programs, SPAN) / numel, high)
        done = high < 0
    else:
        low, high = tl.load(state_ptr), tl.load(state_ptr + 1)
        done = tl.load(state_ptr + 2) > 0
        node = 1
        for step in range(LEVELS):
            # The last pass may be for fewer rounds.
            done |= step >= levels
            reach = tl.load(counts_ptr + node)
            middle = (low + high) / 2
            few, many = reach < count, reach > 2 * count
            fits = (reach >= count) & (reach <= 2 * count)
            # What fits is kept as the lower end, and nothing moves any more.
            low = tl.where(~done & (many | fits), middle, low)
            high = tl.where(~done & few, middle, high)
            done |= fits
            node = 2 * node + many.to(tl.int32)
    tl.store(state_ptr, low)
    tl.store(state_ptr + 1, high)
    tl.store(state_ptr + 2, done.to(tl.float64))
    tl.store(out_ptr, low.to(tl.float32))
    i = tl.arange(0, NODES)
    lows, highs = low + tl.zeros((NODES,), tl.float64), high + tl.zeros((NODES,), tl.float64)
    for step in range(LEVELS - 1):
        right, on = _turn(i, step)
        middle = (lows + highs) / 2
        lows = tl.where(on & right, middle, lows)
        highs = tl.where(on & ~right, middle, highs)
    tl.store(borders_ptr + i, tl.where(done, -1, _rounded((lows + highs) / 2)))


@triton.jit(do_not_specialize=["levels", "spread"])
def rescale_kernel(
    sums_ptr, tops_ptr, counts_ptr, state_ptr, borders_ptr, out_ptr, numel, count, programs,
    levels, spread, FIRST: tl.constexpr, LEVELS: tl.constexpr, NODES: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """state = border, whether it stays."""
    if FIRST:
        mean = _sum_of(sums_ptr, programs, SPAN) / numel
        square = _sum_of(sums_ptr + programs, programs, SPAN) / numel
        deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        border = tl.abs(mean) + spread.to(tl.int64).to(tl.float64, bitcast=True) * deviation
        done = border < 0
    else:
        border = tl.load(state_ptr)
        done = tl.load(state_ptr + 1) > 0
        node = 1
        for step in range(LEVELS):
            # The last pass may be for fewer rounds.
            done |= step >= levels
            reach = tl.load(counts_ptr + node)
            few, many = 3 * reach < 2 * count, 3 * reach > 4 * count
            done |= (3 * reach >= 2 * count) & (3 * reach <= 4 * count)
            border = tl.where(~done & few, border / 2, tl.where(~done & many, border * 1.5, border))
            node = 2 * node + many.to(tl.int32)
    tl.store(state_ptr, border)
    tl.store(state_ptr + 1, done.to(tl.float64))
    tl.store(out_ptr, tl.minimum(border, _top_of(tops_ptr, programs, SPAN)).to(tl.float32))
    i = tl.arange(0, NODES)
    borders = border + tl.zeros((NODES,), tl.float64)
    for step in range(LEVELS - 1):
        right, on = _turn(i, step)
        borders = tl.where(on, tl.where(right, borders * 1.5, borders / 2), borders)
    tl.store(borders_ptr + i, tl.where(done, -1, _rounded(borders)))


@triton.jit(do_not_specialize=["rise"])
def fit_kernel(
    sums_ptr, counts_ptr, tops_ptr, border_ptr, out_ptr, numel, programs, rise,
    FIRST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The border rises by `rise` (the bits of a float64) mean excesses."""
    if FIRST:
        border = tl.full((), 0.0, tl.float64)
        reach = tl.full((), 0.0, tl.float64) + numel
    else:
        border = tl.load(border_ptr)
        reach = _sum_of(counts_ptr, programs, SPAN)
    over = _sum_of(sums_ptr, programs, SPAN) / reach
    border += over * rise.to(tl.int64).to(tl.float64, bitcast=True)
    border = tl.minimum(border, _top_of(tops_ptr, programs, SPAN))
    tl.store(border_ptr, border)
    tl.store(out_ptr, border.to(tl.float32))
