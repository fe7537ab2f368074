"""Ascending positions as a bitmap of blocks and packed low bits (the format: wire/indices.py).

A set bit's rank is the number of ones before it. Each program has a stretch of the bitmap, and
counts the ones before that itself, so that one launch is enough.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.bits import packed_word, unpacked
from laconic.kernels.cuda.words import lowest_bit, ones

PACK_BLOCK = 1024

# Words of the bitmap that a program walks through, and counts at a time before them.
STRETCH = 256
AHEAD = 4096


@triton.jit
def _pack_kernel(
    index_ptr, out_ptr, count, base, words, LOW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = (tl.load(index_ptr + i, mask=i < count, other=0) >> LOW) + i
    bit = (tl.full((BLOCK,), 1, tl.uint32) << (place % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(out_ptr + place // 32, bit, mask=i < count, sem="relaxed")
    if LOW > 0:
        # The low bits begin at bit `base`, inside a word that may have bits of the map too.
        word = base // 32 + i
        shifted = _shifted_word(index_ptr, word, base, count, LOW)
        tl.atomic_or(out_ptr + word, shifted, mask=word < words, sem="relaxed")


@triton.jit
def _shifted_word(index_ptr, word, base, count, LOW: tl.constexpr):
    """Word number `word` of a stream of low bits that begins at bit `base`, a multiple of 8."""
    mask = (tl.full((), 1, tl.int64) << LOW) - 1
    here = packed_word(index_ptr, word - base // 32, count, mask, LOW)
    before = packed_word(index_ptr, word - base // 32 - 1, count, mask, LOW)
    shift = base % 32
    high = here.to(tl.uint32, bitcast=True).to(tl.int64) << shift
    low = before.to(tl.uint32, bitcast=True).to(tl.int64) >> (32 - shift)
    return ((high | low) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _bitmap(words_ptr, word, bits):
    """Words of the bitmap as uint32; what follows it in the last one is cleared."""
    inside = word * 32 < bits
    value = tl.load(words_ptr + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
    spare = tl.where(word * 32 + 32 > bits, word * 32 + 32 - bits, 0)
    spare = tl.minimum(spare, 31).to(tl.uint32)
    return tl.where(inside, value & (tl.full((), 0xFFFFFFFF, tl.uint32) >> spare), 0)


@triton.jit
def _walk_kernel(
    words_ptr, low_ptr, values_ptr, out_ptr, bits, count, numel, weight,
    LOW: tl.constexpr, MODE: tl.constexpr, STRETCH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Comes by every position: MODE 0 writes it, 1 adds its value there, 2 counts what is bad."""
    start = tl.program_id(0).to(tl.int64) * STRETCH
    before, first = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    while first < start:
        word = first + tl.arange(0, AHEAD).to(tl.int64)
        before += tl.sum(ones(_bitmap(words_ptr, word, start * 32)).to(tl.int64))
        first += AHEAD
    word = start + tl.arange(0, STRETCH).to(tl.int64)
    held = _bitmap(words_ptr, word, bits)
    many = ones(held).to(tl.int64)
    rank = before + tl.cumsum(many, 0) - many
    bad = tl.full((), 0, tl.int64)
    while tl.max((held != 0).to(tl.int32), 0) > 0:
        # A wrong bitmap may have more ones than there are positions.
        here = (held != 0) & (rank < count)
        block = word * 32 + lowest_bit(held).to(tl.int64) - rank
        place = block << LOW
        if LOW > 0:
            place |= unpacked(low_ptr, rank, here, LOW)
        if MODE == 0:
            tl.store(out_ptr + rank, place, mask=here)
        elif MODE == 1:
            value = tl.load(values_ptr + rank, mask=here, other=0.0).to(tl.float32) * weight
            total = tl.load(out_ptr + place, mask=here, other=0.0) + value
            tl.store(out_ptr + place, total, mask=here)
        else:
            bad += tl.sum((here & (place >= numel)).to(tl.int64))
        rank += (held != 0).to(tl.int64)
        held &= held - 1
    if MODE == 2:
        tl.atomic_add(out_ptr, tl.sum(many))
        tl.atomic_add(out_ptr + 1, bad)


def _walk(
    mode: int, packed: Tensor, low: int, bitmap_bits: int, count: int, values: Tensor, out: Tensor,
    numel: int = 0, weight: float = 1.0,
) -> None:  # fmt: skip
    words = -(-bitmap_bits // 32)
    _walk_kernel[(-(-words // STRETCH),)](
        whole_words(packed), packed[-(-bitmap_bits // 8) :], values, out, bitmap_bits, count, numel,
        weight, LOW=low, MODE=mode, STRETCH=STRETCH, AHEAD=AHEAD,
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
        _pack_kernel[(-(-lanes // PACK_BLOCK),)](
            index, out, count, border * 8, words, LOW=low, BLOCK=PACK_BLOCK
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
