"""Counter-based random numbers: the same bits as kernels/reference/random.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.types import Key

BLOCK = 1024

# A key must not be taken for a constant: every other one would be compiled for.
KEYS = ["key_low", "key_high"]


@triton.jit
def hash32(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def half(word):
    """A half of a key as uint32; it is given itself, or where it lies."""
    if word.dtype.is_ptr():  # noqa: SIM108, decided when it is compiled
        value = tl.load(word)
    else:
        value = word
    return value.to(tl.uint32)


@triton.jit
def random_word(place, key_low, key_high):
    """32 random bits for each position (int64), as int64."""
    word = hash32((place & 0xFFFFFFFF).to(tl.uint32) ^ half(key_low))
    word = hash32(word ^ half(key_high) ^ (place >> 32).to(tl.uint32))
    return word.to(tl.int64)


@triton.jit
def stratum(i, numel, count, key_low, key_high):
    """The position that is drawn from stratum number i (int64)."""
    start = i * numel // count
    width = (i + 1) * numel // count - start
    return start + ((random_word(i, key_low, key_high) * width) >> 32)


@triton.jit
def _before(block, numel, count, blocks, turn, key_low, key_high):
    """How many entries are left out before a block, and `turn`."""
    spare = numel - count
    edge = block * spare // blocks
    room = (block + 1) * spare // blocks - edge + 1
    return edge + ((random_word(block, key_low, key_high) * room) >> 32) + turn


@triton.jit(do_not_specialize=[*KEYS, "numel", "count"])
def _strata_kernel(out_ptr, numel, count, key_low, key_high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = stratum(i, numel, count, key_low, key_high)
    tl.store(out_ptr + i, place, mask=i < count)


@triton.jit(do_not_specialize=[*KEYS, "numel", "count", "blocks"])
def _blocks_kernel(out_ptr, numel, count, blocks, key_low, key_high, BLOCK: tl.constexpr):
    turn = ((random_word(numel.to(tl.int64), key_low, key_high) >> 1) * numel) >> 31
    # How many entries stay before the end: all of the blocks that lie before it, none of those
    # beyond. Block i lies between i and i + 1 of `blocks` parts, up to rounding: few may be both.
    near = (numel - turn).to(tl.int64) * blocks // numel - 3
    near = tl.maximum(near, 0)
    block = near + tl.arange(0, 8)
    start = block * count // blocks
    room = numel - start - _before(block, numel, count, blocks, turn, key_low, key_high)
    length = (block + 1) * count // blocks - start
    stay = tl.where(block < blocks, tl.minimum(tl.maximum(room, 0), length), 0)
    low = near * count // blocks + tl.sum(stay)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # An entry is in the last block that begins at or before it, block i at count * i // blocks.
    block = ((j + 1) * blocks - 1) // count
    place = j + _before(block, numel, count, blocks, turn, key_low, key_high)
    past = j >= low
    place = tl.where(past, place - numel, place)
    # Those past the end come first.
    tl.store(out_ptr + tl.where(past, j - low, j + count - low), place, mask=j < count)


def halves(key: Key) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """The key as the two words that the kernels take, or as where those lie."""
    if isinstance(key, Tensor):
        return key[:1], key[1:]
    return _word(key), _word(key >> 32)


def _word(bits: int) -> int:
    """The lowest 32 bits as a signed number: above 2^31 it would be another type, and kernel."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def strata(key: Key, numel: int, count: int, device: torch.device) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        grid = -(-count // BLOCK)
        _strata_kernel[(grid,)](out, numel, count, *halves(key), BLOCK=BLOCK)
    return out


def random_blocks(key: Key, numel: int, count: int, block: int, device: torch.device) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        grid, blocks = -(-count // BLOCK), -(-count // block)
        _blocks_kernel[(grid,)](out, numel, count, blocks, *halves(key), BLOCK=BLOCK)
    return out


@triton.jit
def word_at(place, key_low, key_high):
    """32 random bits for each position (int64), as uint32."""
    word = hash32((place & 0xFFFFFFFF).to(tl.uint32) ^ half(key_low))
    return hash32(word ^ half(key_high) ^ (place >> 32).to(tl.uint32))


@triton.jit
def fraction(word):
    """A word as a float32 in [0, 1) on a grid of 2^-24."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
