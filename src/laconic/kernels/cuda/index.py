"""Ascending positions as a bitmap of blocks and packed low bits (the format: wire/indices.py).

A set bit's rank is the number of ones before it: they are counted by stretches of the map first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.bits import ones, packed_word, unpacked
from laconic.kernels.cuda.launch import launch

BLOCK = 1024

# Bits of the map that a program looks at, and words that it counts in one go before them.
STRETCH = 2048
TOGETHER = 16


@triton.jit
def _pack_kernel(
    index_ptr, out_ptr, count, base, words, LOW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    place = (tl.load(index_ptr + i, mask=i < count, other=0) >> LOW) + i
    bit = (tl.full((BLOCK,), 1, tl.uint32) << (place % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(out_ptr + place // 32, bit, mask=i < count, sem="relaxed")
    # The low bits begin at bit `base`, inside a word that may have bits of the map too.
    if LOW > 0 and base // 32 + first < words:
        word = base // 32 + i
        mask = (tl.full((), 1, tl.int64) << LOW) - 1
        lows = packed_word(index_ptr, word * 32 - base, count, mask, LOW)
        tl.atomic_or(out_ptr + word, lows, mask=word < words, sem="relaxed")


@triton.jit
def _count_kernel(
    words_ptr, counts_ptr, bits, stretches, STRETCH: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """The ones of every stretch of the map."""
    stretch = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    word = stretch[:, None] * (STRETCH // 32) + tl.arange(0, STRETCH // 32)[None, :]
    held = tl.load(words_ptr + word, mask=word * 32 < bits, other=0).to(tl.uint32, bitcast=True)
    # What follows the map in its last word is no part of it.
    spare = tl.minimum(tl.maximum(word * 32 + 32 - bits, 0), 31).to(tl.uint32)
    held &= tl.full((), 0xFFFFFFFF, tl.uint32) >> spare
    many = tl.sum(ones(held).to(tl.int32), axis=1)
    tl.store(counts_ptr + stretch, many, mask=stretch < stretches)


@triton.jit
def _walk_kernel(
    words_ptr, counts_ptr, low_ptr, values_ptr, out_ptr, bits, count, numel, weight,
    LOW: tl.constexpr, MODE: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Comes by every position: MODE 0 writes it, 1 adds its value there, 2 counts what is bad."""
    program = tl.program_id(0)
    before, first = tl.full((), 0, tl.int64), 0
    while first < program:
        other = first + tl.arange(0, STRETCH)
        before += tl.sum(tl.load(counts_ptr + other, mask=other < program, other=0).to(tl.int64))
        first += STRETCH
    bit = program.to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    held = tl.load(words_ptr + bit // 32, mask=bit < bits, other=0)
    one = (held >> (bit % 32).to(tl.int32)) & 1
    rank = before + tl.cumsum(one, 0) - one
    # A wrong map may have more ones than there are positions.
    here = (one != 0) & (rank < count)
    place = (bit - rank) << LOW
    if LOW > 0:
        place |= unpacked(low_ptr, rank, here, LOW)
    if MODE == 0:
        tl.store(out_ptr + rank, place, mask=here)
    elif MODE == 1:
        value = tl.load(values_ptr + rank, mask=here, other=0.0).to(tl.float32) * weight
        total = tl.load(out_ptr + place, mask=here, other=0.0) + value
        tl.store(out_ptr + place, total, mask=here)
    else:
        tl.atomic_add(out_ptr, tl.sum(one.to(tl.int64)))
        tl.atomic_add(out_ptr + 1, tl.sum((here & (place >= numel)).to(tl.int64)))


def _walk(
    mode: int, packed: Tensor, low: int, bitmap_bits: int, count: int, values: Tensor, out: Tensor,
    numel: int = 0, weight: float = 1.0,
) -> None:  # fmt: skip
    words, stretches = whole_words(packed), -(-bitmap_bits // STRETCH)
    counts = torch.empty(stretches, dtype=torch.int32, device=packed.device)
    launch(
        _count_kernel, -(-stretches // TOGETHER), words, counts, bitmap_bits, stretches,
        STRETCH=STRETCH, TOGETHER=TOGETHER,
    )  # fmt: skip
    launch(
        _walk_kernel, stretches, words, counts, packed[-(-bitmap_bits // 8) :], values, out,
        bitmap_bits, count, numel, weight, LOW=low, MODE=mode, STRETCH=STRETCH, num_warps=8,
        # A fused multiply-add rounds otherwise than the reference.
        enable_fp_fusion=False,
    )  # fmt: skip


def whole_words(packed: Tensor) -> Tensor:
    """The same bytes as 32-bit words, from a place where words may begin."""
    offset, nbytes = packed.storage_offset(), packed.numel()
    room = packed.untyped_storage().nbytes() - offset
    if offset % 4 or room < -(-nbytes // 4) * 4:
        packed = torch.nn.functional.pad(packed, (0, -nbytes % 4))
        offset = 0
    whole = packed.as_strided((-(-nbytes // 4) * 4,), (1,), offset)
    return whole.view(torch.int32)


def pack_index(index: Tensor, low: int, bitmap_bits: int) -> Tensor:
    count, border = index.numel(), -(-bitmap_bits // 8)
    nbytes = border + -(-count * low // 8)
    words = -(-nbytes // 4)
    out = torch.zeros(words, dtype=torch.int32, device=index.device)
    lanes = max(count, words - border // 4)
    if count:
        launch(
            _pack_kernel,
            -(-lanes // BLOCK),
            index,
            out,
            count,
            border * 8,
            words,
            LOW=low,
            BLOCK=BLOCK,
        )
    return out.view(torch.uint8)[:nbytes]


def unpack_index(packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    _walk(0, packed, low, bitmap_bits, count, out, out)
    return out


def index_fits(packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int) -> Tensor:
    found = torch.zeros(2, dtype=torch.int64, device=packed.device)
    # Spare bits of the last byte are looked at too: a position that they tell is out of range.
    _walk(2, packed, low, -(-bitmap_bits // 8) * 8, count, found, found, numel)
    return (found[0] == count) & (found[1] == 0)


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    _walk(1, packed, low, bitmap_bits, values.numel(), values, out, weight=weight)
