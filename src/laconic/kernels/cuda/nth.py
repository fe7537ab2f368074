"""The magnitude that so many entries reach: exact, without sorting, without the host.

A sample guesses two magnitudes around it, and the pass that adds the residual counts what reaches
them. What lies between is counted by 2048 bins, the bin that holds it by 2048 smaller ones, and so
on until a bin is one number. A guess that misses makes the first bins wider; it is exact anyway.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.passes import TILE, added, finite, magnitude, sources, spread
from laconic.kernels.cuda.random import KEYS, halves, stratum
from laconic.types import Given

SAMPLE = 16384
GUESS = 8192
BINS = 2048
LEVELS = 3
"""Bins of 2^20, 2^9 and 1 in the 31 bits of a magnitude, if no guess helps."""

COARSE = 15
"""A guess has this many zero bits: it is within a 256th, and found in fewer steps."""

FEW = 64
"""Where more than one in so many is inside, those of a bin are added up before they are counted."""

BLOCK = 1024
ROWS = 4


@triton.jit(do_not_specialize=[*KEYS, "numel", "count"])
def _sample_kernel(
    x_ptr, residual_ptr, out_ptr, decay, numel, count, key_low, key_high,
    FEEDBACK: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = stratum(i, numel, count, key_low, key_high)
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    size = magnitude(total)
    if FINITE:
        size = finite(size)
    tl.store(out_ptr + i, size, mask=i < count)


@triton.jit(do_not_specialize=["count", "lower", "upper"])
def _rank_kernel(
    sample_ptr, out_ptr, count, lower, upper, LOWEST: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """out[0]: what `lower` of the sample reach; out[1]: what fewer than `upper` do.

    Both are multiples of 2^LOWEST, as high and as low as possible.
    """
    i = tl.arange(0, SPAN)
    size = tl.load(sample_ptr + i, mask=i < count, other=-1)
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
    # Where even zero is reached by fewer, there is nothing to step over. 2^31 would be negative.
    above = tl.minimum(two.to(tl.int64) + (1 << LOWEST), 0x7FFFFFFF).to(tl.int32)
    tl.store(out_ptr + 1, above)


@triton.jit
def probe_kernel(
    x_ptr, residual_ptr, left_ptr, borders_ptr, counts_ptr, decay, numel,
    FEEDBACK: tl.constexpr, FINITE: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds to `counts` how many magnitudes reach each of MANY borders; one below 0 ends it."""
    borders = tl.load(borders_ptr + tl.arange(0, MANY))
    if tl.max(borders, 0) >= 0:
        row, lane = tl.arange(0, ROWS), tl.arange(0, TILE // ROWS)
        start = tl.program_id(0).to(tl.int64) * TILES * TILE
        found = tl.zeros((MANY, TILE // ROWS), tl.int32)
        for tile in range(TILES):
            place = start + tile * TILE + row[:, None] * (TILE // ROWS) + lane[None, :]
            inside = place < numel
            size = magnitude(added(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK))
            if FINITE:
                size = finite(size)
            size = tl.where(inside, size, -1)
            reach = size[None, :, :] >= borders[:, None, None]
            found += tl.sum(reach.to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + tl.arange(0, MANY), tl.sum(found, axis=1).to(tl.int64))


@triton.jit
def _bracket_kernel(borders_ptr, counts_ptr, state_ptr, count, numel, BINS: tl.constexpr):
    """Where the border lies.

    state = first magnitude, log2 of a bin, entries above, last magnitude, entries inside.
    """
    low, high = tl.load(borders_ptr).to(tl.int64), tl.load(borders_ptr + 1).to(tl.int64)
    reach_low, reach_high = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    below = reach_low < count
    beyond = reach_high >= count
    first = tl.where(beyond, high, tl.where(below, 0, low))
    last = tl.where(beyond, 0x7FFFFFFF, tl.where(below, low, high) - 1)
    above = tl.where(beyond, 0, tl.where(below, reach_low, reach_high))
    shift = tl.full((), 0, tl.int64)
    while ((last - first) >> shift) >= BINS:
        shift += 1
    tl.store(state_ptr, first)
    tl.store(state_ptr + 1, shift)
    tl.store(state_ptr + 2, above)
    tl.store(state_ptr + 3, last)
    tl.store(state_ptr + 4, tl.where(below, numel, tl.where(beyond, numel, reach_low)) - above)


@triton.jit
def _histogram_kernel(
    x_ptr, state_ptr, bins_ptr, numel, FEW: tl.constexpr, BINS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first, last = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 3).to(tl.int32)
    shift = tl.load(state_ptr + 1).to(tl.int32)
    many = tl.load(state_ptr + 4) * FEW > numel
    # Below zero when a bin is one number already.
    if shift >= 0:
        start = tl.program_id(0).to(tl.int64) * TILES * TILE
        for tile in range(TILES):
            place = start + tile * TILE + tl.arange(0, TILE)
            size = magnitude(tl.load(x_ptr + place, mask=place < numel, other=0.0))
            inside = (place < numel) & (size >= first) & (size <= last)
            bin_ = tl.where(inside, (size - first) >> shift, BINS)
            if many:
                # Often most of them are equal: those of the first bin are added all at once.
                lowest = tl.min(bin_, 0)
                equal = tl.sum((bin_ == lowest).to(tl.int64))
                tl.atomic_add(bins_ptr + lowest, equal, mask=lowest < BINS, sem="relaxed")
                inside &= bin_ != lowest
            one = tl.full((TILE,), 1, tl.int64)
            tl.atomic_add(bins_ptr + bin_, one, mask=inside, sem="relaxed")


@triton.jit
def _narrow_kernel(bins_ptr, state_ptr, count, BINS: tl.constexpr, STEP: tl.constexpr):
    """Goes on with the bin that holds the border, in smaller bins; in none if they are of one."""
    shift = tl.load(state_ptr + 1)
    if shift >= 0:
        bin_ = tl.arange(0, BINS)
        held = tl.load(bins_ptr + bin_)
        reach = tl.load(state_ptr + 2) + tl.sum(held) - tl.cumsum(held, 0) + held
        chosen = tl.sum((reach >= count).to(tl.int32)) - 1
        above = tl.sum(tl.where(bin_ == chosen, reach - held, 0))
        tl.store(state_ptr + 4, tl.sum(tl.where(bin_ == chosen, held, 0)))
        first = tl.load(state_ptr) + (chosen.to(tl.int64) << shift)
        last = first + (tl.full((), 1, tl.int64) << shift) - 1
        tl.store(state_ptr, first)
        tl.store(state_ptr + 3, tl.minimum(tl.load(state_ptr + 3), last))
        tl.store(state_ptr + 1, tl.where(shift == 0, -1, tl.maximum(shift - STEP, 0)))
        tl.store(state_ptr + 2, above)


def sampled(given: Given, key: int, tried: int, finite_only: bool) -> Tensor:
    """The magnitudes (bits) of `tried` entries of the sum, drawn by `key`."""
    x, residual, left, decay = given
    feedback = residual is not None and left is not None
    out = torch.empty(tried, dtype=torch.int32, device=x.device)
    _sample_kernel[(-(-tried // BLOCK),)](
        x, x if residual is None else residual, out, decay,
        x.numel(), tried, *halves(key), FEEDBACK=feedback, FINITE=finite_only, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def ranked(sample: Tensor, lower: int, upper: int, lowest: int) -> Tensor:
    """Two borders around a rank of a sample of at most SAMPLE magnitudes: see `_rank_kernel`."""
    out = torch.empty(2, dtype=torch.int32, device=sample.device)
    span = max(32, triton.next_power_of_2(sample.numel()))
    _rank_kernel[(1,)](
        sample, out, sample.numel(), lower, upper, LOWEST=lowest, SPAN=span,
        num_warps=min(32, max(1, span // 256)),
    )  # fmt: skip
    return out


def probe(given: Given, borders: Tensor, counts: Tensor, finite_only: bool) -> None:
    """Adds to `counts` (int64) how many of the sum reach each border; `left` then holds the sum."""
    x, residual, left, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    probe_kernel[(programs,)](
        x, residual, left, borders, counts, decay, x.numel(),
        FEEDBACK=feedback, FINITE=finite_only, MANY=borders.numel(), ROWS=ROWS, TILES=tiles,
        TILE=TILE, num_warps=8,
    )  # fmt: skip


def nth_largest(given: Given, count: int) -> Tensor:
    """[border, -1, entries above it, border, entries on it], int64: the count-th largest's bits.

    `given.left` then holds the sum. 0 < count <= numel.
    """
    numel = given.x.numel()
    tried = min(numel, GUESS)
    aim = count * tried / numel
    room = 0.05 * aim + 4 * math.sqrt(aim)
    lower, upper = math.ceil(aim + room) + 1, math.floor(aim - room)
    guess = ranked(sampled(given, 0, tried, False), min(lower, tried), max(upper, 1), COARSE)
    # The counts of two borders, the state, and the bins of all levels in one.
    memory = torch.zeros(2 + 6 + LEVELS * BINS, dtype=torch.int64, device=given.x.device)
    counts, state, bins = memory[:2], memory[2:8], memory[8:].view(LEVELS, BINS)
    probe(given, guess, counts, False)
    _bracket_kernel[(1,)](guess, counts, state, count, numel, BINS=BINS, num_warps=1)
    total = given.x if given.left is None else given.left
    programs, tiles = spread(numel)
    for level in bins:
        _histogram_kernel[(programs,)](
            total,
            state,
            level,
            numel,
            FEW=FEW,
            BINS=BINS,
            TILES=tiles,
            TILE=TILE,
            num_warps=8,
        )
        _narrow_kernel[(1,)](level, state, count, BINS=BINS, STEP=BINS.bit_length() - 1)
    return state
