"""The magnitude of some rank in a sample that is drawn by a key: exact, by passes over the sample.

Most of the sample lies below the guess (cuda/guess.py), so the first pass counts only a little.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.brackets import (
    BINS,
    BRACKETS,
    COARSE,
    HEAD,
    NEAR,
    SAMPLE,
    SAMPLE_ROW,
    bounds,
    counted,
    is_last,
    narrow,
    tally,
    width,
)
from laconic.kernels.cuda.passes import finite, magnitude
from laconic.kernels.cuda.random import KEYS, halves, stratum
from laconic.types import Given, Key

BLOCK = 1024
LEVELS = 3
LAUNCH = tl.constexpr(4)


@triton.jit(do_not_specialize=[*KEYS, "numel", "count"])
def _draw_kernel(
    x_ptr, residual_ptr, sizes_ptr, state_ptr, decay, numel, count, key_low, key_high,
    FEEDBACK: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The magnitudes of the drawn, those that are not finite as zero, and their coarse bins."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = stratum(i, numel, count, key_low, key_high)
    total = tl.load(x_ptr + place, mask=i < count, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=i < count, other=0.0)
    size = finite(magnitude(total))
    tl.store(sizes_ptr + i, size, mask=i < count)
    first, _ = bounds(state_ptr, SAMPLE)
    first = first.to(tl.int32)
    bins_ptr = state_ptr + HEAD + SAMPLE_ROW * BINS
    marked = (i < count) & (size >= first)
    near = marked & (size - first < NEAR)
    above = tl.sum((marked & ~near).to(tl.int64))
    tl.atomic_add(state_ptr + BRACKETS + 4 * SAMPLE + 2, above, mask=above > 0, sem="relaxed")
    tally(bins_ptr, size, near, first, COARSE, BINS)
    if is_last(state_ptr, LAUNCH):
        reach = counted(state_ptr, SAMPLE_ROW, BINS, HEAD)
        narrow(state_ptr, SAMPLE, reach, COARSE, count, BINS)


@triton.jit(do_not_specialize=["count", "level"])
def _rank_kernel(
    sizes_ptr, state_ptr, count, level, BINS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The same in smaller bins, until one is a single number."""
    first, last = bounds(state_ptr, SAMPLE)
    if first < last:
        shift = width(first, last, BINS)
        row = SAMPLE_ROW + 1 + level
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size = tl.load(sizes_ptr + i, mask=i < count, other=-1)
        inside = (size >= first) & (size <= last)
        bins_ptr = state_ptr + HEAD + row * BINS
        tally(bins_ptr, size, inside, first.to(tl.int32), shift.to(tl.int32), BINS)
        if is_last(state_ptr, LAUNCH + 1 + level):
            narrow(state_ptr, SAMPLE, counted(state_ptr, row, BINS, HEAD), shift, count, BINS)


def rank_drawn(given: Given, state: Tensor, key: Key, tried: int) -> None:
    """Closes the sample's bracket: on the magnitude of its rank among `tried` drawn entries."""
    x, residual, left, decay = given
    feedback = residual is not None and left is not None
    sizes = torch.empty(tried, dtype=torch.int32, device=x.device)
    grid = (-(-tried // BLOCK),)
    _draw_kernel[grid](
        x, x if residual is None else residual, sizes, state, decay, x.numel(), tried,
        *halves(key), FEEDBACK=feedback, BINS=BINS, HEAD=HEAD, BLOCK=BLOCK,
    )  # fmt: skip
    for level in range(LEVELS):
        _rank_kernel[grid](sizes, state, tried, level, BINS=BINS, HEAD=HEAD, BLOCK=BLOCK)
