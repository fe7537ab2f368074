"""Thresholds for about so many magnitudes (the meaning: kernels/reference/borders.py).

The host only launches: small kernels of one program decide what the next pass over memory counts.
Where each of some rounds would be a pass, one pass counts for all that three rounds can come to:
the 7 nodes of a binary tree, numbered 1 to 7 from its root, the children of i being 2i and 2i+1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from laconic.kernels.cuda.decide import (
    bisect_kernel,
    fit_kernel,
    ladder_kernel,
    rescale_kernel,
    settle_kernel,
)
from laconic.kernels.cuda.nth import nth_of_sample
from laconic.kernels.cuda.passes import probe
from laconic.kernels.cuda.statistics import excess, statistics
from laconic.kernels.reference.borders import HALVINGS, LOWERINGS
from laconic.types import Given

RUNGS = 16
"""Borders that a sampled one can be lowered to, rounded up to a power of two."""

NODES = 8
LEVELS = 3
"""Rounds that one pass counts for, and the nodes of their tree, with one that is not used."""


def double(value: float) -> int:
    """The bits of a float64: as a number, Triton would round it to float32."""
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


def _summed(given: Given) -> Given:
    """The same when `left` holds the sum."""
    return Given(given.x if given.left is None else given.left)


def sampled_border(given: Given, key: int, tried: int, top: int, enough: int) -> Tensor:
    x = given.x
    if not x.numel():
        return x.new_zeros(1)
    start = nth_of_sample(given, key, tried, top)
    borders = torch.empty(RUNGS, dtype=torch.int32, device=x.device)
    counts = torch.zeros(RUNGS, dtype=torch.int64, device=x.device)
    ladder_kernel[(1,)](start, borders, STEPS=LOWERINGS, NODES=RUNGS, num_warps=1)
    probe(given, borders, counts, True)
    out = x.new_empty(1)
    settle_kernel[(1,)](
        borders,
        counts,
        out.view(torch.int32),
        enough,
        STEPS=LOWERINGS,
        NODES=RUNGS,
        num_warps=1,
    )
    return out


def bisected_border(given: Given, count: int) -> Tensor:
    if not given.x.numel():
        return given.x.new_zeros(1)
    sums, tops = statistics(given, squares=False)
    return _settled(bisect_kernel, given, sums, tops, count, HALVINGS)


def normal_border(given: Given, spread: float, count: int, rounds: int) -> Tensor:
    if not given.x.numel():
        return given.x.new_zeros(1)
    sums, tops = statistics(given, squares=True)
    return _settled(rescale_kernel, given, sums, tops, count, rounds, double(spread))


def _settled(
    decide: Any, given: Given, sums: Tensor, tops: Tensor, count: int, rounds: int, *more: int
) -> Tensor:
    """What so many rounds of a kernel's decisions come to, with a pass for every LEVELS of them."""
    x, programs = given.x, tops.numel()
    passes = -(-rounds // LEVELS)
    # Before the first decision nothing is counted.
    counts = torch.zeros(passes + 1, NODES, dtype=torch.int64, device=x.device)
    state = torch.empty(3, dtype=torch.float64, device=x.device)
    borders = torch.empty(NODES, dtype=torch.int32, device=x.device)
    out = x.new_empty(1)
    for number in range(passes + 1):
        levels = min(LEVELS, rounds - LEVELS * (number - 1))
        decide[(1,)](
            sums, tops, counts[number], state, borders, out, x.numel(), count, programs,
            levels, *more, FIRST=number == 0, LEVELS=LEVELS, NODES=NODES,
            SPAN=triton.next_power_of_2(programs), num_warps=1,
        )  # fmt: skip
        if number < passes:
            probe(_summed(given), borders, counts[number + 1], True)
    return out


def excess_border(given: Given, shares: Sequence[float]) -> Tensor:
    x = given.x
    if not x.numel():
        return x.new_zeros(1)
    sums, tops = statistics(given, squares=False)
    found = tops
    state = torch.empty(1, dtype=torch.float64, device=x.device)
    out = x.new_empty(1)
    for stage, share in enumerate(shares):
        if stage:
            excess(_summed(given), out, sums, found := torch.empty_like(tops))
        fit_kernel[(1,)](
            sums, found, tops, state, out, x.numel(), tops.numel(),
            double(-math.log(share)), FIRST=stage == 0,
            SPAN=triton.next_power_of_2(tops.numel()), num_warps=4,
        )  # fmt: skip
    return out
