"""Bitmask of candidate entries: one bit per entry, in words of 32, in the ranges of passes.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import popcount, trailing_zeros
from gradwire.kernels.cuda.threshold.passes import TILE, grid_of, magnitude

# Words that are handled at once.
WORDS = 512
MIN_WORDS = 128
REGISTERS: int | None = 64
"""Registers per thread: with more, fewer programs run at once and hide memory latency."""


@triton.jit
def store_bitmask(words_ptr, start, marked, TILE: tl.constexpr):
    """Writes the bits of a tile that begins at entry `start`."""
    bits = tl.reshape(marked.to(tl.int32), (TILE // 32, 32))
    words = tl.sum(bits << tl.arange(0, 32)[None, :], axis=1)
    tl.store(words_ptr + start // 32 + tl.arange(0, TILE // 32), words)


@triton.jit
def load_words(words_ptr, begin, EACH: tl.constexpr, WORDS: tl.constexpr):
    """Returns numbers (int64) and bits (uint32) of WORDS of the program's EACH words."""
    lane = begin + tl.arange(0, WORDS)
    word = tl.program_id(0).to(tl.int64) * EACH + lane
    bits = tl.load(words_ptr + word, mask=lane < EACH, other=0)
    return word, bits.to(tl.uint32, bitcast=True)


@triton.jit
def max_popcount(bits):
    """Returns the most set bits in any of the words: the number of steps to visit them all."""
    return tl.max(popcount(bits).to(tl.int32), 0)


@triton.jit
def first_marked(x_ptr, word, bits):
    """Returns the magnitude of the first marked entry of each word, and whether it has one."""
    index = word * 32 + trailing_zeros(bits).to(tl.int64)
    return magnitude(tl.load(x_ptr + index, mask=bits != 0, other=0.0)), bits != 0


@triton.jit
def mark_reaching(x_ptr, words_ptr, threshold, numel, TILES: tl.constexpr, TILE: tl.constexpr):
    """Marks all magnitudes from the threshold (1 or more) on in the program's range.

    Returns how many there are, and how many of them are not finite.
    """
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    count = tl.full((), 0, tl.int32)
    nonfinite = tl.full((), 0, tl.int32)
    for tile in range(TILES):
        index = start + tile * TILE + tl.arange(0, TILE)
        size = magnitude(tl.load(x_ptr + index, mask=index < numel, other=0.0))
        store_bitmask(words_ptr, start + tile * TILE, size >= threshold, TILE)
        count += tl.sum((size >= threshold).to(tl.int32))
        nonfinite += tl.sum((size >= 0x7F800000).to(tl.int32))
    tl.debug_barrier()
    return count, nonfinite


def new_bitmask(x: Tensor) -> Tensor:
    """Allocates the bitmask of all programs."""
    programs, tiles = grid_of(x.numel())
    return torch.empty(programs * tiles * TILE // 32, dtype=torch.int32, device=x.device)


def words_per_step(words: Tensor, programs: int) -> int:
    """Returns the words a program handles at once: no more than it has, in whole warps."""
    return max(MIN_WORDS, min(WORDS, triton.next_power_of_2(words.numel() // programs)))
