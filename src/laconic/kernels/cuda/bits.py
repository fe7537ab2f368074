"""Small unsigned numbers, packed (the format: kernels/reference/bits.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


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


@triton.jit
def packed_word(values_ptr, start, count, mask, WIDTH: tl.constexpr):
    """32 bits of the stream of values & mask, from bit `start` (int64) on, which may be below 0."""
    first = tl.where(start >= 0, start, start - WIDTH + 1) // WIDTH
    held = tl.zeros_like(start)
    for j in tl.static_range((31 + WIDTH) // WIDTH + 1):
        i = first + j
        inside = (i >= 0) & (i < count)
        value = tl.load(values_ptr + i, mask=inside, other=0).to(tl.int64) & mask
        shift = i * WIDTH - start
        ahead = tl.where((shift >= 0) & (shift < 32), value << (shift & 31), 0)
        held |= tl.where(shift < 0, value >> tl.minimum(-shift, 63), ahead)
    return (held & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def unpacked(packed_ptr, i, inside, WIDTH: tl.constexpr):
    """Value number i (int64) of the stream that begins at `packed_ptr` (bytes), as int64."""
    bit = i * WIDTH
    held = tl.zeros_like(bit)
    for j in tl.static_range((WIDTH + 14) // 8):
        # The last byte may be none of this value's, and beyond the end.
        needed = inside & (8 * j < (bit % 8) + WIDTH)
        byte = tl.load(packed_ptr + bit // 8 + j, mask=needed, other=0).to(tl.int64)
        held |= byte << (8 * j)
    return (held >> (bit % 8)) & ((1 << WIDTH) - 1)


@triton.jit
def number_at(ptr, bit, here, width, BYTES: tl.constexpr):
    """`width` bits of a stream from number `bit` on; they lie in BYTES bytes at most."""
    held = tl.zeros_like(bit)
    for j in tl.static_range(BYTES):
        needed = here & (8 * j < (bit % 8) + width)
        held |= tl.load(ptr + bit // 8 + j, mask=needed, other=0).to(bit.dtype) << (8 * j)
    return (held >> (bit % 8)) & ((tl.full((), 1, bit.dtype) << width) - 1)


@triton.jit
def _pack_kernel(values_ptr, out_ptr, count, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = packed_word(values_ptr, word * 32, count, -1, WIDTH)
    tl.store(out_ptr + word, packed, mask=word < words)


@triton.jit
def _unpack_kernel(packed_ptr, out_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, unpacked(packed_ptr, i, i < count, WIDTH), mask=i < count)


def pack_bits(values: Tensor, width: int) -> Tensor:
    count, nbytes = values.numel(), -(-values.numel() * width // 8)
    words = -(-nbytes // 4)
    out = torch.empty(words, dtype=torch.int32, device=values.device)
    if words:
        # Triton has no pointers to booleans.
        plain = values.view(torch.uint8) if values.dtype == torch.bool else values
        _pack_kernel[(-(-words // BLOCK),)](plain, out, count, words, WIDTH=width, BLOCK=BLOCK)
    return out.view(torch.uint8)[:nbytes]


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    if count:
        _unpack_kernel[(-(-count // BLOCK),)](packed, out, count, WIDTH=width, BLOCK=BLOCK)
    return out
