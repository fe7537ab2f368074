"""Counter-based random numbers: the same bits as kernels/reference/random.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.types import Key

BLOCK = 1024

# Keys change at every step, and must not be specialised on.
KEYS = ["key_low", "key_high"]


@triton.jit
def hash32(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def load_half(word):
    """Returns half a key as uint32, from its value or from a pointer to it."""
    if word.dtype.is_ptr():  # noqa: SIM108, decided when it is compiled
        value = tl.load(word)
    else:
        value = word
    return value.to(tl.uint32)


@triton.jit
def random_int64(index, key_low, key_high):
    """Returns 32 random bits for each index (int64), as int64."""
    word = hash32((index & 0xFFFFFFFF).to(tl.uint32) ^ load_half(key_low))
    word = hash32(word ^ load_half(key_high) ^ (index >> 32).to(tl.uint32))
    return word.to(tl.int64)


@triton.jit
def stratum(i, numel, count, key_low, key_high):
    """Returns the index that is drawn from stratum number i (int64)."""
    start = i * numel // count
    width = (i + 1) * numel // count - start
    return start + ((random_int64(i, key_low, key_high) * width) >> 32)


@triton.jit
def _block_offset(block, numel, count, blocks, rotation, key_low, key_high):
    """Returns how many entries are left out before a block, plus `rotation`."""
    free = numel - count
    edge = block * free // blocks
    slack = (block + 1) * free // blocks - edge + 1
    return edge + ((random_int64(block, key_low, key_high) * slack) >> 32) + rotation


@triton.jit(do_not_specialize=[*KEYS, "count"])
def _uniform_kernel(out_ptr, count, key_low, key_high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, fraction(random_bits(i, key_low, key_high)), mask=i < count)


@triton.jit(do_not_specialize=[*KEYS, "numel", "count"])
def _strata_kernel(out_ptr, numel, count, key_low, key_high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = stratum(i, numel, count, key_low, key_high)
    tl.store(out_ptr + i, index, mask=i < count)


@triton.jit(do_not_specialize=[*KEYS, "numel", "count", "blocks"])
def _blocks_kernel(out_ptr, numel, count, blocks, key_low, key_high, BLOCK: tl.constexpr):
    rotation = ((random_int64(numel.to(tl.int64), key_low, key_high) >> 1) * numel) >> 31
    # How many entries do not wrap around: all of the blocks before the end, none of those beyond.
    # Block i lies between i and i + 1 of `blocks` parts, up to rounding, so few can straddle it.
    nearest = (numel - rotation).to(tl.int64) * blocks // numel - 3
    nearest = tl.maximum(nearest, 0)
    block = nearest + tl.arange(0, 8)
    start = block * count // blocks
    space = numel - start - _block_offset(block, numel, count, blocks, rotation, key_low, key_high)
    length = (block + 1) * count // blocks - start
    head_lengths = tl.where(block < blocks, tl.minimum(tl.maximum(space, 0), length), 0)
    head = nearest * count // blocks + tl.sum(head_lengths)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Entry j is in the last block that begins at or before j, block i at count * i // blocks.
    block = ((j + 1) * blocks - 1) // count
    index = j + _block_offset(block, numel, count, blocks, rotation, key_low, key_high)
    wrapped = j >= head
    index = tl.where(wrapped, index - numel, index)
    # Entries that wrapped around come first.
    tl.store(out_ptr + tl.where(wrapped, j - head, j + count - head), index, mask=j < count)


def key_words(key: Key) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Returns the key as the two words that the kernels take, or as tensors that hold them."""
    if isinstance(key, Tensor):
        return key[:1], key[1:]
    return _word(key), _word(key >> 32)


def _word(bits: int) -> int:
    """Returns the low 32 bits, signed: from 2^31 on Triton would compile another kernel."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def uniform(key: Key, count: int, device: torch.device) -> Tensor:
    out = torch.empty(count, device=device)
    if count:
        _uniform_kernel[(-(-count // BLOCK),)](out, count, *key_words(key), BLOCK=BLOCK)
    return out


def strata(key: Key, numel: int, count: int, device: torch.device) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        grid = -(-count // BLOCK)
        _strata_kernel[(grid,)](out, numel, count, *key_words(key), BLOCK=BLOCK)
    return out


def random_blocks(key: Key, numel: int, count: int, block: int, device: torch.device) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        grid, blocks = -(-count // BLOCK), -(-count // block)
        _blocks_kernel[(grid,)](out, numel, count, blocks, *key_words(key), BLOCK=BLOCK)
    return out


@triton.jit
def random_bits(index, key_low, key_high):
    """Returns 32 random bits for each index (int64), as uint32."""
    word = hash32((index & 0xFFFFFFFF).to(tl.uint32) ^ load_half(key_low))
    return hash32(word ^ load_half(key_high) ^ (index >> 32).to(tl.uint32))


@triton.jit
def fraction(word):
    """Converts a word to a float32 in [0, 1) on a grid of 2^-24."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
