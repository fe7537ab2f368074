"""Bitmask of candidate entries: one bit per entry, in words of 32, in the ranges of passes.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import lowest_bit, ones
from gradwire.kernels.cuda.threshold.passes import TILE, magnitude, spread

# Words that are walked through at once.
WORDS = 512
LEAST = 128
REGISTERS: int | None = 64
"""Of a thread that walks: with more, fewer programs run side by side and wait for memory."""


@triton.jit
def store_marks(words_ptr, start, marked, TILE: tl.constexpr):
    """Writes a tile of marks that begins at entry `start`."""
    bits = tl.reshape(marked.to(tl.int32), (TILE // 32, 32))
    words = tl.sum(bits << tl.arange(0, 32)[None, :], axis=1)
    tl.store(words_ptr + start // 32 + tl.arange(0, TILE // 32), words)


@triton.jit
def marks(words_ptr, begin, EACH: tl.constexpr, WORDS: tl.constexpr):
    """Numbers (int64) and bits (uint32) of WORDS words of this program's EACH, from `begin` on."""
    lane = begin + tl.arange(0, WORDS)
    word = tl.program_id(0).to(tl.int64) * EACH + lane
    held = tl.load(words_ptr + word, mask=lane < EACH, other=0)
    return word, held.to(tl.uint32, bitcast=True)


@triton.jit
def most_marks(held):
    """The most marks in any of the words: how often the next of each must be looked at."""
    return tl.max(ones(held).to(tl.int32), 0)


@triton.jit
def first_marked(x_ptr, word, held):
    """The magnitude of the first marked entry of each word, and whether it has one."""
    place = word * 32 + lowest_bit(held).to(tl.int64)
    return magnitude(tl.load(x_ptr + place, mask=held != 0, other=0.0)), held != 0


@triton.jit
def mark_from(x_ptr, words_ptr, border, numel, TILES: tl.constexpr, TILE: tl.constexpr):
    """Marks all magnitudes from the border (1 or more) on in this program's stretch.

    What comes out is how many there are, and how many of them are not finite.
    """
    start = tl.program_id(0).to(tl.int64) * TILES * TILE
    found = tl.full((), 0, tl.int32)
    odd = tl.full((), 0, tl.int32)
    for tile in range(TILES):
        place = start + tile * TILE + tl.arange(0, TILE)
        size = magnitude(tl.load(x_ptr + place, mask=place < numel, other=0.0))
        store_marks(words_ptr, start + tile * TILE, size >= border, TILE)
        found += tl.sum((size >= border).to(tl.int32))
        odd += tl.sum((size >= 0x7F800000).to(tl.int32))
    tl.debug_barrier()
    return found, odd


def new_marks(x: Tensor) -> Tensor:
    """Room for the marks of all programs."""
    programs, tiles = spread(x.numel())
    return torch.empty(programs * tiles * TILE // 32, dtype=torch.int32, device=x.device)


def together(words: Tensor, programs: int) -> int:
    """How many words a program looks at together: no more than it has, by whole warps."""
    return max(LEAST, min(WORDS, triton.next_power_of_2(words.numel() // programs)))
