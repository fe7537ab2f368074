"""Selection by magnitude: entries are marked in a bitmask, then collected in order.

A pass marks what reaches a threshold, and counts it per program; the output offset of a program is
the sum of the counts before it. For the k largest, the threshold is found first (kth_magnitude.py),
and of the entries equal to it only the first stay marked (definition: kernels/reference/select.py).
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import lowest_bit, ones
from gradwire.kernels.cuda.threshold.bitmask import WORDS, marks, new_marks, store_marks
from gradwire.kernels.cuda.threshold.dependent_launch import in_turn, leads
from gradwire.kernels.cuda.threshold.kth_magnitude import nth_largest
from gradwire.kernels.cuda.threshold.passes import (
    PROGRAMS,
    TILE,
    added,
    clear,
    magnitude,
    sources,
    spread,
    sum_before,
)
from gradwire.types import EFInput


@triton.jit(do_not_specialize=["border", "room"])
def _mark_kernel(
    x_ptr, residual_ptr, left_ptr, border, words_ptr, counts_ptr, packed_ptr, decay, numel, room,
    FEEDBACK: tl.constexpr, LOAD: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Marks every magnitude from the border (bits, or with LOAD where they are) on; no zeros."""
    in_turn(EARLY)
    clear(packed_ptr, room, TILE)
    if LOAD:
        border = tl.load(border)
    border = tl.maximum(border, 1)
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    found = 0
    for tile in range(TILES):
        place = start + tile * TILE + tl.arange(0, TILE)
        inside = place < numel
        size = magnitude(added(x_ptr, residual_ptr, left_ptr, decay, place, inside, FEEDBACK))
        marked = inside & (size >= border)
        found += tl.sum(marked.to(tl.int32))
        store_marks(words_ptr, start + tile * TILE, marked, TILE)
    tl.store(counts_ptr + tl.program_id(0), found)


# `ties` begin where the counts end, which is aligned for some sizes.
@triton.jit(do_not_specialize=["ties_ptr"])
def _thin_kernel(
    x_ptr, state_ptr, words_ptr, counts_ptr, ties_ptr, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Takes the marks from what is below the border; counts what is left, and what is on it."""
    border = tl.load(state_ptr).to(tl.int32)
    found = tl.zeros((WORDS,), tl.int32)
    ties = tl.zeros((WORDS,), tl.int32)
    for begin in range(0, EACH, WORDS):
        word, held = marks(words_ptr, begin, EACH, WORDS)
        kept = tl.zeros_like(held)
        while tl.max((held != 0).to(tl.int32), 0) > 0:
            place = word * 32 + lowest_bit(held).to(tl.int64)
            size = magnitude(tl.load(x_ptr + place, mask=held != 0, other=0.0))
            kept |= tl.where(size >= border, held & (0 - held), 0)
            ties += ((held != 0) & (size == border)).to(tl.int32)
            held &= held - 1
        found += ones(kept).to(tl.int32)
        inside = begin + tl.arange(0, WORDS) < EACH
        tl.store(words_ptr + word, kept.to(tl.int32, bitcast=True), mask=inside)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(found))
    tl.store(ties_ptr + tl.program_id(0), tl.sum(ties))


@triton.jit(do_not_specialize=["count", "ties_ptr"])
def _trim_kernel(
    x_ptr, state_ptr, words_ptr, counts_ptr, ties_ptr, count, numel, TILES: tl.constexpr,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Takes the marks from the last of those on the border, so that `count` are left."""
    program = tl.program_id(0)
    border = tl.load(state_ptr).to(tl.int32)
    wanted = count - tl.load(state_ptr + 2) - sum_before(ties_ptr, program, PROGRAMS)
    ties = tl.load(ties_ptr + program)
    if ties > wanted:
        wanted = tl.maximum(wanted, 0)
        tl.store(counts_ptr + program, (tl.load(counts_ptr + program) - ties + wanted).to(tl.int32))
        start = program.to(tl.int64) * TILES * TILE
        for tile in range(TILES):
            place = start + tile * TILE + tl.arange(0, TILE)
            size = magnitude(tl.load(x_ptr + place, mask=place < numel, other=0.0))
            equal = ((size == border) & (place < numel)).to(tl.int32)
            kept = (size > border) | ((equal != 0) & (tl.cumsum(equal, 0) <= wanted))
            store_marks(words_ptr, start + tile * TILE, kept, TILE)
            wanted -= tl.sum(equal)


@triton.jit
def _collect_kernel(
    words_ptr, counts_ptr, out_ptr, EACH: tl.constexpr, WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    before = sum_before(counts_ptr, tl.program_id(0), PROGRAMS)
    for begin in range(0, EACH, WORDS):
        word, held = marks(words_ptr, begin, EACH, WORDS)
        many = ones(held).to(tl.int64)
        rank = before + tl.cumsum(many, 0) - many
        before += tl.sum(many)
        while tl.max((held != 0).to(tl.int32), 0) > 0:
            place = word * 32 + lowest_bit(held).to(tl.int64)
            tl.store(out_ptr + rank, place, mask=held != 0)
            rank += 1
            held &= held - 1


def _collect(words: Tensor, counts: Tensor, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=words.device)
    programs = counts.numel()
    if count:
        each = words.numel() // programs
        _collect_kernel[(programs,)](words, counts, out, EACH=each, WORDS=WORDS, PROGRAMS=PROGRAMS)
    return out


def largest(given: EFInput, count: int) -> Tensor:
    numel = given.grad.numel()
    if count == 0 or count >= numel:
        given.total()
        return torch.arange(min(count, numel), device=given.grad.device)
    state, words = nth_largest(given, count)
    total = given.grad if given.residual_out is None else given.residual_out
    programs, tiles = spread(numel)
    counts, ties = torch.empty(2, programs, dtype=torch.int32, device=total.device)
    each = tiles * TILE // 32
    _thin_kernel[(programs,)](total, state, words, counts, ties, EACH=each, WORDS=WORDS)
    _trim_kernel[(programs,)](
        total, state, words, counts, ties, count, numel, TILES=tiles, TILE=TILE, PROGRAMS=PROGRAMS,
        num_warps=8,
    )  # fmt: skip
    return _collect(words, counts, count)


def _mark(
    given: EFInput, border: Tensor | int, words: Tensor, counts: Tensor, packed: Tensor
) -> None:
    x, residual, residual_out, decay, feedback = sources(given)
    programs, tiles = spread(x.numel())
    _mark_kernel[(programs,)](
        x, residual, residual_out, border, words, counts, packed, decay, x.numel(), packed.numel(),
        FEEDBACK=feedback, LOAD=isinstance(border, Tensor), TILES=tiles, TILE=TILE, num_warps=8,
        **leads(x),
    )  # fmt: skip


def mark(given: EFInput, border: float, words: Tensor, counts: Tensor, packed: Tensor) -> None:
    """Marks all magnitudes from `border` on, counts them by program, and clears `packed`."""
    _mark(given, _bits(border), words, counts, packed)


@cache
def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def reaching(given: EFInput, border: Tensor) -> Tensor:
    x = given.grad
    if not x.numel():
        return torch.arange(0, device=x.device)
    words = new_marks(x)
    counts = torch.empty(spread(x.numel())[0], dtype=torch.int32, device=x.device)
    _mark(given, border.view(torch.int32), words, counts, counts[:0])
    # Here the host waits: how many there are is the length of the message.
    return _collect(words, counts, int(counts.cpu().numpy().sum(dtype=np.int64)))
