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

from gradwire.kernels.cuda.packing import popcount, trailing_zeros
from gradwire.kernels.cuda.scatter import to_wire_dtype
from gradwire.kernels.cuda.threshold.bitmask import load_words, max_popcount, new_bitmask
from gradwire.kernels.cuda.threshold.compaction import PLAN_HEADER, compact, plan_marked
from gradwire.kernels.cuda.threshold.dependent_launch import dependent_options, wait_for_previous
from gradwire.kernels.cuda.threshold.histogram import LIMIT, bounds
from gradwire.kernels.cuda.threshold.passes import TILE, grid_of, magnitude
from gradwire.kernels.cuda.threshold.select import mark
from gradwire.kernels.cuda.threshold.thresholds import run_search, search_of
from gradwire.kernels.reference.composed import max_selected
from gradwire.kernels.reference.packing import index_bytes
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput

WORDS = 128
WARPS = 4
"""Words that a program handles at once: few, since all wait for the one with most set bits."""


@triton.jit
def _keep_first_ties(x_ptr, word, bits, threshold, ties_before, ties_wanted):
    """Unmarks entries equal to the threshold after `ties_wanted`; returns the bits and the ties."""
    tied = tl.zeros_like(bits)
    rest = bits
    while tl.max((rest != 0).to(tl.int32), 0) > 0:
        index = word * 32 + trailing_zeros(rest).to(tl.int64)
        size = magnitude(tl.load(x_ptr + index, mask=rest != 0, other=0.0))
        tied |= tl.where((rest != 0) & (size == threshold), rest & (0 - rest), 0)
        rest &= rest - 1
    counts = popcount(tied).to(tl.int64)
    rank = ties_before + tl.cumsum(counts, 0) - counts
    rest = tied
    while tl.max((rest != 0).to(tl.int32), 0) > 0:
        bits ^= tl.where(rank >= ties_wanted, rest & (0 - rest), 0)
        rank += 1
        rest &= rest - 1
    return bits, tl.sum(counts)


@triton.jit
def _write_bits(packed_ptr, bit, value, mask):
    """Sets the bits of `value` (int64, not negative) from bit `bit` on."""
    word = packed_ptr + bit // 32
    both = value << (bit % 32)
    low = (both & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = ((both >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@triton.jit(do_not_specialize=["programs"])
def _emit_kernel(
    x_ptr, state_ptr, words_ptr, ties_ptr, plan_ptr, packed_ptr, values_ptr, index_ptr, programs,
    LIMITED: tl.constexpr, SUBTRACT: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr,
    EACH: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes positions and values; with SUBTRACT, subtracts the sent values from `x`.

    With the FORM "message" positions are packed into bits of `packed`; otherwise they are written
    as they are, and "positions" writes nothing else.
    """
    wait_for_previous(PDL)
    program = tl.program_id(0)
    low, base, ties_wanted = tl.load(plan_ptr), tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    # In a plain bitmap (`low` < 0) the rank of a position does not move its bit.
    rank_weight = (low >= 0).to(tl.int64)
    low = tl.maximum(low, 0)
    low_mask = (tl.full((), 1, tl.int64) << low) - 1
    before = tl.load(plan_ptr + PLAN_HEADER + program)
    ties_before = tl.full((), 0, tl.int64)
    has_surplus = ties_before > 0
    threshold = tl.full((), 0, tl.int32)
    if LIMITED:
        ties_before = tl.load(plan_ptr + PLAN_HEADER + programs + program)
        has_surplus = ties_before + tl.load(ties_ptr + program) > ties_wanted
        last, _ = bounds(state_ptr, LIMIT)
        threshold = last.to(tl.int32)
    for begin in range(0, EACH, WORDS):
        word, bits = load_words(words_ptr, begin, EACH, WORDS)
        if has_surplus:
            bits, ties = _keep_first_ties(x_ptr, word, bits, threshold, ties_before, ties_wanted)
            ties_before += ties
        counts = popcount(bits).to(tl.int32)
        rank = before + (tl.cumsum(counts, 0) - counts)
        before += tl.sum(counts)
        steps = max_popcount(bits)
        while steps > 0:
            here = bits != 0
            index = word * 32 + trailing_zeros(bits).to(tl.int64)
            if FORM != "message":
                tl.store(index_ptr + rank, index, mask=here)
            if FORM != "positions":
                entry = tl.load(x_ptr + index, mask=here, other=0.0)
                value = to_wire_dtype(entry, values_ptr, HALF)
                tl.store(values_ptr + rank, value, mask=here)
                if SUBTRACT:
                    tl.store(x_ptr + index, entry - value.to(tl.float32), mask=here)
            if FORM == "message":
                one = tl.full(index.shape, 1, tl.int64)
                _write_bits(packed_ptr, (index >> low) + rank * rank_weight, one, here)
                _write_bits(packed_ptr, base + rank * low, index & low_mask, here)
            rank += 1
            bits &= bits - 1
            steps -= 1


class _Selection(NamedTuple):
    """The marked entries, and where each program writes its own."""

    x: Tensor
    state: Tensor
    words: Tensor
    ties: Tensor
    plan: Tensor
    limited: bool

    def write_message(self, packed: Tensor, values: Tensor, *, subtract: bool) -> None:
        self._write("message", packed, values, self.plan, subtract)

    def write_positions(self, index: Tensor) -> None:
        self._write("positions", index, self.x, index, False)

    def write_both(self, index: Tensor, values: Tensor) -> None:
        self._write("both", index, values, index, False)

    def _write(
        self, form: str, packed: Tensor, values: Tensor, index: Tensor, subtract: bool
    ) -> None:
        """Launches the kernel; tensors that the form does not write may be anything."""
        programs, tiles = grid_of(self.x.numel())
        _emit_kernel[(programs,)](
            self.x, self.state, self.words, self.ties, self.plan, packed, values, index, programs,
            LIMITED=self.limited, SUBTRACT=subtract, HALF=values.dtype == torch.float16, FORM=form,
            EACH=tiles * TILE // 32, WORDS=WORDS, num_warps=WARPS, **dependent_options(self.x),
        )  # fmt: skip


def _select(ef: EFInput, spec: ThresholdSpec, count: Tensor, packed: Tensor) -> _Selection:
    """Marks entries above the threshold, stores their number in `count`, and zeroes `packed`."""
    numel = ef.grad.numel()
    total = ef.grad if ef.residual_out is None else ef.residual_out
    counts = torch.empty(grid_of(numel)[0], dtype=torch.int32, device=total.device)
    if spec.kind == "fixed":
        words = new_bitmask(total)
        mark(ef, spec.threshold, words, counts, packed)
        return _Selection(total, counts, words, counts, plan_marked(counts, count, numel), False)
    search = search_of(spec)
    first = run_search(ef, search, packed)
    ties, plan = compact(total, first, search, max_selected(spec, numel), counts, count)
    return _Selection(total, first.state, first.words, ties, plan, True)


def encode_by_threshold(
    ef: EFInput, spec: ThresholdSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, numel = ef.grad, ef.grad.numel()
    max_count = max_selected(spec, numel)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    values = torch.empty(max_count, dtype=dtype, device=x.device)
    # Fewer positions may need a byte more.
    nbytes = index_bytes(numel, max_count) + 1
    packed = torch.empty(-(-nbytes // 4) + 1, dtype=torch.int32, device=x.device)
    if not numel:
        return count.zero_(), packed.zero_().view(torch.uint8)[:nbytes], values
    _select(ef, spec, count, packed).write_message(
        packed, values, subtract=ef.residual_out is not None
    )
    return count, packed.view(torch.uint8)[:nbytes], values


def select_by_threshold(ef: EFInput, spec: ThresholdSpec) -> Tensor:
    x = ef.grad
    if not x.numel():
        return torch.arange(0, device=x.device)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    selection = _select(ef, spec, count, count[:0])
    # Synchronizes with the host: the length of the result is the count.
    index = torch.empty(int(count), dtype=torch.int64, device=x.device)
    selection.write_positions(index)
    return index


def select_by_threshold_padded(ef: EFInput, spec: ThresholdSpec) -> tuple[Tensor, Tensor, Tensor]:
    x, max_count = ef.grad, max_selected(spec, ef.grad.numel())
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    index = torch.empty(max_count, dtype=torch.int64, device=x.device)
    values = torch.zeros(max_count, device=x.device)
    if not x.numel():
        return count.zero_(), index, values
    _select(ef, spec, count, count[:0]).write_both(index, values)
    return count, index, values
