"""Signs as votes (the meaning: kernels/reference/votes.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import called, compiled
from laconic.kernels.cpu.random import halves, random_word
from laconic.kernels.cpu.threads import in_slices
from laconic.kernels.cpu.vector import LANES, bits_of, negatives, zeros

BLOCK = 4096


@called
def largest_bits(x: NDArray[np.float32]) -> np.int32:
    """The bits of the largest magnitude; those of NaN are above all others."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, bits_of(x[i]) & np.int32(0x7FFFFFFF))
    return largest


@compiled
def _pack(
    x: NDArray[np.float32], first: int, low: np.uint32, high: np.uint32, words: NDArray[np.uint32]
) -> np.int32:
    """The largest magnitude's bits; so many words come before as `first` says."""
    largest = np.int32(0)
    whole = x.size // LANES
    for start in range(0, whole * LANES, BLOCK):
        block = x[start : min(start + BLOCK, whole * LANES)]
        largest = max(largest, largest_bits(block))
        for i in range(block.size // LANES):
            word, zero = negatives(block, i * LANES), zeros(block, i * LANES)
            if zero:
                word |= zero & random_word(first + start // LANES + i, low, high)
            words[start // LANES + i] = word
    if x.size % LANES:
        coins, last = random_word(first + whole, low, high), np.uint32(0)
        for i in range(x.size - whole * LANES):
            entry = x[whole * LANES + i]
            voted = np.uint32(entry < 0) | (np.uint32(entry == 0) & (coins >> np.uint32(i)))
            last |= np.uint32((voted & np.uint32(1)) << np.uint32(i))
        words[whole] = last
        largest = max(largest, largest_bits(x[whole * LANES :]))
    return largest


def votes_pack(x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    words = torch.empty(-(-x.numel() // LANES), dtype=torch.int32)
    entries, coins, out = x.numpy(), halves(key), words.numpy().view(np.uint32)

    def loop(start: int, stop: int) -> np.int32:
        first = start // LANES
        return _pack(entries[start:stop], first, *coins, out[first:])

    largest = max(in_slices(loop, x.numel(), BLOCK))
    say = float("nan") if largest >= 0x7F800000 else float(largest > 0)
    return words.view(torch.uint8)[: -(-x.numel() // 8)], torch.tensor([say])
