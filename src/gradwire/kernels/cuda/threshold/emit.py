"""Sparse messages of the entries above a threshold, with the count left on the device.

Buffers have room for the largest possible count. The candidates of first_pass.py are compacted to
those that reach the threshold; each program then writes their values and positions from its output
offset on.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.packing import lowest_bit, ones
from gradwire.kernels.cuda.scatter import said
from gradwire.kernels.cuda.threshold.bitmask import marks, most_marks, new_marks
from gradwire.kernels.cuda.threshold.compaction import PLAN, planned, thin
from gradwire.kernels.cuda.threshold.dependent_launch import follows, in_turn
from gradwire.kernels.cuda.threshold.histogram import MOST, bounds
from gradwire.kernels.cuda.threshold.passes import TILE, magnitude, spread
from gradwire.kernels.cuda.threshold.select import mark
from gradwire.kernels.cuda.threshold.thresholds import found, search_of
from gradwire.kernels.reference.composed import most_of
from gradwire.kernels.reference.packing import index_bytes
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput

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
    x_ptr, state_ptr, words_ptr, ties_ptr, plan_ptr, packed_ptr, values_ptr, index_ptr, programs,
    CUTS: tl.constexpr, KEEP: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr,
    EACH: tl.constexpr, WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes positions and values; with KEEP, what was said is taken off `x`.

    Of the FORM "message" positions go to bits of `packed`; otherwise they are written as they are,
    and "positions" are all that is written.
    """
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
            if FORM != "message":
                tl.store(index_ptr + rank, place, mask=here)
            if FORM != "positions":
                chosen = tl.load(x_ptr + place, mask=here, other=0.0)
                value = said(chosen, values_ptr, HALF)
                tl.store(values_ptr + rank, value, mask=here)
                if KEEP:
                    tl.store(x_ptr + place, chosen - value.to(tl.float32), mask=here)
            if FORM == "message":
                one = tl.full(place.shape, 1, tl.int64)
                _write_bits(packed_ptr, (place >> low) + rank, one, here)
                _write_bits(packed_ptr, base + rank * low, place & below, here)
            rank += 1
            held &= held - 1
            turns -= 1


class _Marked(NamedTuple):
    """What is chosen, and where each program writes its own."""

    x: Tensor
    state: Tensor
    words: Tensor
    ties: Tensor
    plan: Tensor
    cuts: bool

    def write_message(self, packed: Tensor, values: Tensor, *, keep: bool) -> None:
        self._write("message", packed, values, self.plan, keep)

    def write_positions(self, index: Tensor) -> None:
        self._write("positions", index, self.x, index, False)

    def write_both(self, index: Tensor, values: Tensor) -> None:
        self._write("both", index, values, index, False)

    def _write(self, form: str, packed: Tensor, values: Tensor, index: Tensor, keep: bool) -> None:
        """Of the three, what a form does not write may be anything."""
        programs, tiles = spread(self.x.numel())
        _tell_kernel[(programs,)](
            self.x, self.state, self.words, self.ties, self.plan, packed, values, index, programs,
            CUTS=self.cuts, KEEP=keep, HALF=values.dtype == torch.float16, FORM=form,
            EACH=tiles * TILE // 32, WORDS=WORDS, num_warps=WARPS, **follows(self.x),
        )  # fmt: skip


def _marked(given: EFInput, aim: ThresholdSpec, count: Tensor, packed: Tensor) -> _Marked:
    """Marks what passes, whose number goes to `count`; `packed` is cleared."""
    numel = given.grad.numel()
    total = given.grad if given.residual_out is None else given.residual_out
    counts = torch.empty(spread(numel)[0], dtype=torch.int32, device=total.device)
    if aim.kind == "fixed":
        words = new_marks(total)
        mark(given, aim.border, words, counts, packed)
        return _Marked(total, counts, words, counts, planned(counts, count, numel), False)
    search = search_of(aim)
    sifted = found(given, search, packed)
    ties, plan = thin(total, sifted, search, most_of(aim, numel), counts, count)
    return _Marked(total, sifted.state, sifted.words, ties, plan, True)


def tell(given: EFInput, aim: ThresholdSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, numel = given.grad, given.grad.numel()
    most = most_of(aim, numel)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    values = torch.empty(most, dtype=dtype, device=x.device)
    # Fewer positions may take a byte more.
    room = index_bytes(numel, most) + 1
    packed = torch.empty(-(-room // 4) + 1, dtype=torch.int32, device=x.device)
    if not numel:
        return count.zero_(), packed.zero_().view(torch.uint8)[:room], values
    _marked(given, aim, count, packed).write_message(
        packed, values, keep=given.residual_out is not None
    )
    return count, packed.view(torch.uint8)[:room], values


def passing(given: EFInput, aim: ThresholdSpec) -> Tensor:
    x = given.grad
    if not x.numel():
        return torch.arange(0, device=x.device)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    marked = _marked(given, aim, count, count[:0])
    # Here the host waits: who asks for positions wants to know how many there are.
    index = torch.empty(int(count), dtype=torch.int64, device=x.device)
    marked.write_positions(index)
    return index


def passing_in_room(given: EFInput, aim: ThresholdSpec) -> tuple[Tensor, Tensor, Tensor]:
    x, most = given.grad, most_of(aim, given.grad.numel())
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    index = torch.empty(most, dtype=torch.int64, device=x.device)
    values = torch.zeros(most, device=x.device)
    if not x.numel():
        return count.zero_(), index, values
    _marked(given, aim, count, count[:0]).write_both(index, values)
    return count, index, values
