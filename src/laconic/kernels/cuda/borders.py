"""Thresholds for about so many magnitudes (the meaning: kernels/reference/borders.py).

The host only launches: small kernels of one program decide what the next pass over memory counts.
Where each of some rounds would be a pass, one pass counts for all that four rounds can come to:
the 15 nodes of a binary tree, numbered 1 to 15 from its root, the children of i being 2i and 2i+1.
"""

import math
from collections.abc import Sequence

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
from laconic.kernels.cuda.nth import SAMPLE, nth_largest, probe, ranked, sampled
from laconic.kernels.cuda.statistics import excess, statistics
from laconic.kernels.reference.borders import HALVINGS, LOWERINGS
from laconic.types import Given

NODES = 16
LEVELS = 4
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
    sample = sampled(given, key, tried, True)
    if tried <= SAMPLE:
        start = ranked(sample, top, top, 0)
    else:
        start = nth_largest(Given(sample.view(torch.float32)), top)
    borders = torch.empty(NODES, dtype=torch.int32, device=x.device)
    counts = torch.zeros(NODES, dtype=torch.int64, device=x.device)
    ladder_kernel[(1,)](start, borders, STEPS=LOWERINGS, NODES=NODES, num_warps=1)
    probe(given, borders, counts, True)
    out = x.new_empty(1)
    settle_kernel[(1,)](
        borders, counts, out.view(torch.int32), enough, STEPS=LOWERINGS, NODES=NODES, num_warps=1
    )
    return out


def bisected_border(given: Given, count: int) -> Tensor:
    x = given.x
    if not x.numel():
        return x.new_zeros(1)
    sums, tops = statistics(given, squares=False)
    passes = -(-HALVINGS // LEVELS)
    counts = torch.zeros(passes, NODES, dtype=torch.int64, device=x.device)
    state = torch.empty(3, dtype=torch.float64, device=x.device)
    borders = torch.empty(NODES, dtype=torch.int32, device=x.device)
    out = x.new_empty(1)
    for number in range(passes + 1):
        before = counts[max(0, number - 1)]
        bisect_kernel[(1,)](
            sums, tops, before, state, borders, out, x.numel(), count, sums.shape[1],
            FIRST=number == 0, LEVELS=LEVELS, NODES=NODES,
            SPAN=triton.next_power_of_2(sums.shape[1]), num_warps=1,
        )  # fmt: skip
        if number < passes:
            probe(_summed(given), borders, counts[number], True)
    return out


def normal_border(given: Given, spread: float, count: int, rounds: int) -> Tensor:
    x = given.x
    if not x.numel():
        return x.new_zeros(1)
    sums, tops = statistics(given, squares=True)
    passes = -(-rounds // LEVELS)
    counts = torch.zeros(max(1, passes), NODES, dtype=torch.int64, device=x.device)
    state = torch.empty(2, dtype=torch.float64, device=x.device)
    borders = torch.empty(NODES, dtype=torch.int32, device=x.device)
    out = x.new_empty(1)
    for number in range(passes + 1):
        before = counts[max(0, number - 1)]
        rescale_kernel[(1,)](
            sums, tops, before, state, borders, out, x.numel(), count, sums.shape[1],
            min(LEVELS, rounds - LEVELS * (number - 1)), double(spread),
            FIRST=number == 0, LEVELS=LEVELS, NODES=NODES,
            SPAN=triton.next_power_of_2(sums.shape[1]), num_warps=1,
        )  # fmt: skip
        if number < passes:
            probe(_summed(given), borders, counts[number], True)
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
            sums, found, tops, state, out, x.numel(), sums.shape[1], double(-math.log(share)),
            FIRST=stage == 0, SPAN=triton.next_power_of_2(sums.shape[1]), num_warps=4,
        )  # fmt: skip
    return out
