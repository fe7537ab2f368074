"""What passes a threshold, told as a message, without the host knowing how many there are.

The buffers have room for the most there can be. The marked (cuda/sift.py) are thinned to those that
reach the border, counted by program; then each program knows how many come before its own, and
writes their values and positions where they belong.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.aim import Aim
from laconic.kernels.cuda.bits import lowest_bit, ones
from laconic.kernels.cuda.borders import found, search_of
from laconic.kernels.cuda.brackets import MOST, bounds
from laconic.kernels.cuda.early import follows, in_turn
from laconic.kernels.cuda.entries import said
from laconic.kernels.cuda.marks import marks, most_marks, new_marks
from laconic.kernels.cuda.passes import TILE, magnitude, spread
from laconic.kernels.cuda.plan import PLAN, planned
from laconic.kernels.cuda.select import mark
from laconic.kernels.cuda.thin import thin
from laconic.kernels.reference.index import index_bytes
from laconic.types import Given

WORDS = 128
WARPS = 4
"""Words of marks that are told together: few, since all wait for the one with the most marks."""


@triton.jit
def _first_ties(x_ptr, word, held, border, before, wanted):
    """The marked without those on the border that come after `wanted`, and how many are on it."""
    tied = tl.zeros_like(held)
    rest = held
    while tl.max((rest != 0).to(tl.int32), 0) > 0:
        place = word * 32 + lowest_bit(rest).to(tl.int64)
        size = magnitude(tl.load(x_ptr + place, mask=rest != 0, other=0.0))
        tied |= tl.where((rest != 0) & (size == border), rest & (0 - rest), 0)
        rest &= rest - 1
    many = ones(tied).to(tl.int64)
    rank = before + tl.cumsum(many, 0) - many
    rest = tied
    while tl.max((rest != 0).to(tl.int32), 0) > 0:
        held ^= tl.where(rank >= wanted, rest & (0 - rest), 0)
        rank += 1
        rest &= rest - 1
    return held, tl.sum(many)


@triton.jit
def _write_bits(packed_ptr, bit, value, mask):
    """Sets the bits of `value` (int64, not negative) from number `bit` on."""
    word = packed_ptr + bit // 32
    both = value << (bit % 32)
    low = (both & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = ((both >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@triton.jit(do_not_specialize=["programs"])
def _tell_kernel(
    x_ptr, state_ptr, words_ptr, ties_ptr, plan_ptr, packed_ptr, values_ptr, programs,
    CUTS: tl.constexpr, KEEP: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr,
    WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes values and positions; with KEEP, what was said is taken off `x`."""
    in_turn(EARLY)
    mine = tl.program_id(0)
    low, base, wanted = tl.load(plan_ptr), tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    below = (tl.full((), 1, tl.int64) << low) - 1
    before = tl.load(plan_ptr + PLAN + mine)
    equal = tl.full((), 0, tl.int64)
    surplus = equal > 0
    border = tl.full((), 0, tl.int32)
    if CUTS:
        equal = tl.load(plan_ptr + PLAN + programs + mine)
        surplus = equal + tl.load(ties_ptr + mine) > wanted
        last, _ = bounds(state_ptr, MOST)
        border = last.to(tl.int32)
    for begin in range(0, EACH, WORDS):
        word, held = marks(words_ptr, begin, EACH, WORDS)
        if surplus:
            held, met = _first_ties(x_ptr, word, held, border, equal, wanted)
            equal += met
        many = ones(held).to(tl.int32)
        rank = before + (tl.cumsum(many, 0) - many)
        before += tl.sum(many)
        turns = most_marks(held)
        while turns > 0:
            here = held != 0
            place = word * 32 + lowest_bit(held).to(tl.int64)
            chosen = tl.load(x_ptr + place, mask=here, other=0.0)
            value = said(chosen, values_ptr, HALF)
            tl.store(values_ptr + rank, value, mask=here)
            if KEEP:
                tl.store(x_ptr + place, chosen - value.to(tl.float32), mask=here)
            _write_bits(packed_ptr, (place >> low) + rank, tl.full(place.shape, 1, tl.int64), here)
            _write_bits(packed_ptr, base + rank * low, place & below, here)
            rank += 1
            held &= held - 1
            turns -= 1


def tell(given: Given, aim: Aim, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, numel = given.x, given.x.numel()
    most = min(aim.most or numel, numel)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    values = torch.empty(most, dtype=dtype, device=x.device)
    # Fewer positions may take a byte more.
    room = index_bytes(numel, most) + 1
    packed = torch.empty(-(-room // 4) + 1, dtype=torch.int32, device=x.device)
    if not numel:
        return count.zero_(), packed.zero_().view(torch.uint8)[:room], values
    total = x if given.left is None else given.left
    programs, tiles = spread(numel)
    counts = torch.empty(programs, dtype=torch.int32, device=x.device)
    cuts = aim.kind != "fixed"
    if cuts:
        search = search_of(aim)
        sifted = found(given, search, packed)
        state, words = sifted.state, sifted.words
        ties, plan = thin(total, sifted, search, most, counts, count)
    else:
        state, ties, words = counts, counts, new_marks(x)
        mark(given, aim.border, words, counts, packed)
        plan = planned(counts, count, numel)
    _tell_kernel[(programs,)](
        total, state, words, ties, plan, packed, values, programs, CUTS=cuts,
        KEEP=given.left is not None, HALF=dtype == torch.float16, EACH=tiles * TILE // 32,
        WORDS=WORDS, num_warps=WARPS, **follows(x),
    )  # fmt: skip
    return count, packed.view(torch.uint8)[:room], values
