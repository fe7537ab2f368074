"""Words of 32 bits: how many are set, and which is the first."""

import triton
import triton.language as tl


@triton.jit
def ones(word):
    """The number of set bits of each word (uint32)."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def lowest_bit(word):
    """The number of zeros below the lowest set bit of each word (uint32)."""
    return ones((word & (0 - word)) - 1)
