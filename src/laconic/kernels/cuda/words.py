"""Random words beside entries, as numbers that a kernel can compare with."""

import triton
import triton.language as tl

from laconic.kernels.cuda.random import half, hash32


@triton.jit
def word_at(place, key_low, key_high):
    """32 random bits for each position (int64), as uint32."""
    word = hash32((place & 0xFFFFFFFF).to(tl.uint32) ^ half(key_low))
    return hash32(word ^ half(key_high) ^ (place >> 32).to(tl.uint32))


@triton.jit
def fraction(word):
    """A word as a float32 in [0, 1) on a grid of 2^-24."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
