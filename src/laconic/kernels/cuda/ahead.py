"""Where borders that rise by stages will be, as far as a sample tells before any is known."""

from collections.abc import Sequence

import triton
import triton.language as tl

from laconic.kernels.cuda.brackets import AHEAD
from laconic.kernels.cuda.passes import finite, number, spread

FORESEEN = tl.constexpr(2)
"""Borders: those that come after need a pass over memory each."""
DEVIATIONS = tl.constexpr(3.0)
"""Of the sample's fit, to either side of a border."""


@triton.jit
def _bits(value):
    """A float64 as the bits of a magnitude above zero, as int64."""
    bits = tl.maximum(value, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(bits, 1).to(tl.int64)


@triton.jit
def _fitted(value, here, border, rise):
    """How far a border rises by those of a sample that reach it, and the variance of that."""
    here &= value >= border
    reach = tl.sum(here.to(tl.float64))
    over = tl.where(here, value - border, 0.0)
    mean = tl.sum(over) / reach
    variance = tl.maximum(tl.sum(over * over) / reach - mean * mean, 0.0) / reach
    return rise * mean, rise * rise * variance


@triton.jit
def foresee(state_ptr, sizes, factor, rise):
    """Notes between which magnitudes the first two borders will be; a size below 0 is none."""
    here = sizes >= 0
    value = number(finite(tl.maximum(sizes, 0)))
    top = tl.max(value, 0)
    border = top * 0.0
    doubt = border
    for bracket in tl.static_range(FORESEEN):
        step = (factor if bracket == 0 else rise).to(tl.int64).to(tl.float64, bitcast=True)
        over, variance = _fitted(value, here, border, step)
        border = tl.minimum(border + over, top)
        doubt += variance
        margin = DEVIATIONS * tl.sqrt(doubt)
        tl.store(state_ptr + AHEAD + 2 * bracket, _bits(border - margin))
        tl.store(state_ptr + AHEAD + 2 * bracket + 1, _bits(border + margin))


@triton.jit
def bracket_ahead(state_ptr, bracket):
    """First magnitude put aside for a border, and first beyond, as int32."""
    ptr = state_ptr + AHEAD + 2 * bracket
    return tl.load(ptr).to(tl.int32), tl.load(ptr + 1).to(tl.int32)


def is_foreseen(rises: Sequence[int], numel: int) -> bool:
    """Whether it pays: not where a tensor is small, whose passes are short."""
    return len(rises) > 0 and spread(numel)[1] > 1
