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

from gradwire.kernels.cuda.packing import popcount, trailing_zeros
from gradwire.kernels.cuda.threshold.bitmask import WORDS, load_words, new_bitmask, store_bitmask
from gradwire.kernels.cuda.threshold.dependent_launch import first_options, wait_for_previous
from gradwire.kernels.cuda.threshold.kth_magnitude import kth_largest
from gradwire.kernels.cuda.threshold.passes import (
    PROGRAMS,
    TILE,
    clear,
    grid_of,
    kernel_inputs,
    load_total,
    magnitude,
    sum_before,
)
from gradwire.types import EFInput


@triton.jit(do_not_specialize=["threshold", "packed_words"])
def _mark_kernel(
    x_ptr, residual_ptr, residual_out_ptr, threshold, words_ptr, counts_ptr, packed_ptr, decay,
    numel, packed_words, FEEDBACK: tl.constexpr, LOAD: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Marks magnitudes from the threshold on (bits, or a pointer with LOAD), except zeros."""
    wait_for_previous(PDL)
    clear(packed_ptr, packed_words, TILE)
    if LOAD:
        threshold = tl.load(threshold)
    threshold = tl.maximum(threshold, 1)
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    count = 0
    for tile in range(TILES):
        index = start + tile * TILE + tl.arange(0, TILE)
        inside = index < numel
        size = magnitude(
            load_total(x_ptr, residual_ptr, residual_out_ptr, decay, index, inside, FEEDBACK)
        )
        marked = inside & (size >= threshold)
        count += tl.sum(marked.to(tl.int32))
        store_bitmask(words_ptr, start + tile * TILE, marked, TILE)
    tl.store(counts_ptr + tl.program_id(0), count)


# `ties` begin where the counts end, which is aligned for some sizes only.
@triton.jit(do_not_specialize=["ties_ptr"])
def _compact_kernel(
    x_ptr, state_ptr, words_ptr, counts_ptr, ties_ptr, EACH: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Unmarks entries below the threshold; counts the rest, and those equal to it."""
    threshold = tl.load(state_ptr).to(tl.int32)
    count = tl.zeros((WORDS,), tl.int32)
    ties = tl.zeros((WORDS,), tl.int32)
    for begin in range(0, EACH, WORDS):
        word, bits = load_words(words_ptr, begin, EACH, WORDS)
        remaining = tl.zeros_like(bits)
        while tl.max((bits != 0).to(tl.int32), 0) > 0:
            index = word * 32 + trailing_zeros(bits).to(tl.int64)
            size = magnitude(tl.load(x_ptr + index, mask=bits != 0, other=0.0))
            remaining |= tl.where(size >= threshold, bits & (0 - bits), 0)
            ties += ((bits != 0) & (size == threshold)).to(tl.int32)
            bits &= bits - 1
        count += popcount(remaining).to(tl.int32)
        inside = begin + tl.arange(0, WORDS) < EACH
        tl.store(words_ptr + word, remaining.to(tl.int32, bitcast=True), mask=inside)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count))
    tl.store(ties_ptr + tl.program_id(0), tl.sum(ties))


@triton.jit(do_not_specialize=["count", "ties_ptr"])
def _drop_ties_kernel(
    x_ptr, state_ptr, words_ptr, counts_ptr, ties_ptr, count, numel, TILES: tl.constexpr,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Unmarks the last of the entries equal to the threshold, so that `count` are left."""
    program = tl.program_id(0)
    threshold = tl.load(state_ptr).to(tl.int32)
    ties_wanted = count - tl.load(state_ptr + 2) - sum_before(ties_ptr, program, PROGRAMS)
    ties = tl.load(ties_ptr + program)
    if ties > ties_wanted:
        ties_wanted = tl.maximum(ties_wanted, 0)
        tl.store(
            counts_ptr + program, (tl.load(counts_ptr + program) - ties + ties_wanted).to(tl.int32)
        )
        start = program.to(tl.int64) * TILES * TILE
        for tile in range(TILES):
            index = start + tile * TILE + tl.arange(0, TILE)
            size = magnitude(tl.load(x_ptr + index, mask=index < numel, other=0.0))
            equal = ((size == threshold) & (index < numel)).to(tl.int32)
            remaining = (size > threshold) | ((equal != 0) & (tl.cumsum(equal, 0) <= ties_wanted))
            store_bitmask(words_ptr, start + tile * TILE, remaining, TILE)
            ties_wanted -= tl.sum(equal)


@triton.jit
def _collect_kernel(
    words_ptr, counts_ptr, out_ptr, EACH: tl.constexpr, WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    before = sum_before(counts_ptr, tl.program_id(0), PROGRAMS)
    for begin in range(0, EACH, WORDS):
        word, bits = load_words(words_ptr, begin, EACH, WORDS)
        counts = popcount(bits).to(tl.int64)
        rank = before + tl.cumsum(counts, 0) - counts
        before += tl.sum(counts)
        while tl.max((bits != 0).to(tl.int32), 0) > 0:
            index = word * 32 + trailing_zeros(bits).to(tl.int64)
            tl.store(out_ptr + rank, index, mask=bits != 0)
            rank += 1
            bits &= bits - 1


def _collect(words: Tensor, counts: Tensor, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=words.device)
    programs = counts.numel()
    if count:
        words_each = words.numel() // programs
        _collect_kernel[(programs,)](
            words, counts, out, EACH=words_each, WORDS=WORDS, PROGRAMS=PROGRAMS
        )
    return out


def select_largest(ef: EFInput, count: int) -> Tensor:
    numel = ef.grad.numel()
    if count == 0 or count >= numel:
        ef.total()
        return torch.arange(min(count, numel), device=ef.grad.device)
    state, words = kth_largest(ef, count)
    total = ef.grad if ef.residual_out is None else ef.residual_out
    programs, tiles = grid_of(numel)
    counts, ties = torch.empty(2, programs, dtype=torch.int32, device=total.device)
    words_each = tiles * TILE // 32
    _compact_kernel[(programs,)](total, state, words, counts, ties, EACH=words_each, WORDS=WORDS)
    _drop_ties_kernel[(programs,)](
        total, state, words, counts, ties, count, numel, TILES=tiles, TILE=TILE, PROGRAMS=PROGRAMS,
        num_warps=8,
    )  # fmt: skip
    return _collect(words, counts, count)


def _mark(
    ef: EFInput, threshold: Tensor | int, words: Tensor, counts: Tensor, packed: Tensor
) -> None:
    x, residual, residual_out, decay, feedback = kernel_inputs(ef)
    programs, tiles = grid_of(x.numel())
    _mark_kernel[(programs,)](
        x, residual, residual_out, threshold, words, counts, packed, decay, x.numel(),
        packed.numel(), FEEDBACK=feedback, LOAD=isinstance(threshold, Tensor), TILES=tiles,
        TILE=TILE, num_warps=8, **first_options(x),
    )  # fmt: skip


def mark(ef: EFInput, threshold: float, words: Tensor, counts: Tensor, packed: Tensor) -> None:
    """Marks all magnitudes from `threshold` on, counts them by program, and zeroes `packed`."""
    _mark(ef, _bits(threshold), words, counts, packed)


@cache
def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def select_above(ef: EFInput, threshold: Tensor) -> Tensor:
    x = ef.grad
    if not x.numel():
        return torch.arange(0, device=x.device)
    words = new_bitmask(x)
    counts = torch.empty(grid_of(x.numel())[0], dtype=torch.int32, device=x.device)
    _mark(ef, threshold.view(torch.int32), words, counts, counts[:0])
    # Synchronizes with the host: the length of the result is the count.
    return _collect(words, counts, int(counts.cpu().numpy().sum(dtype=np.int64)))
