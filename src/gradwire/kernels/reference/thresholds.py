"""Estimates of the threshold that a wanted number of magnitudes reach: one float32 each.

Each function adds the residual first, so `ef.residual_out` then holds the sum. Non-finite entries
count as zero here; `select_above` selects them whatever the threshold is. Sums are float64 in an
order of the backend's choice, so thresholds may differ between backends by one unit in the last
place.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.reference.random import strata
from gradwire.types import EFInput, Key

LOWERINGS = 10
"""A sampled threshold is multiplied by 0.8 at most this often."""

HALVINGS = 20
"""Bisection steps: enough to divide the range from mean to maximum into millionths."""


def finite_size(x: Tensor) -> Tensor:
    return x.abs().nan_to_num_(0.0, 0.0)


def sampled_threshold(
    ef: EFInput, key: Key, sample_size: int, sample_rank: int, min_count: int
) -> Tensor:
    """Returns the `sample_rank`-th largest of a sample of magnitudes, lowered if too few reach it.

    It is lowered by a fifth until `min_count` magnitudes reach it, ten times at most.
    """
    size = finite_size(ef.total())
    if not size.numel():
        return size.new_zeros(1)
    place = strata(key, size.numel(), sample_size, size.device)
    threshold = size[place].topk(sample_rank, sorted=False).values.min().double()
    for _ in range(LOWERINGS):
        few = (size >= threshold).sum() < min_count
        # On a GPU the host would wait in every round; the remaining rounds change nothing there.
        if not size.is_cuda and not bool(few):
            break
        threshold = torch.where(few, 0.8 * threshold, threshold)
    return threshold.to(size.dtype).view(1)


def bisected_threshold(ef: EFInput, count: int) -> Tensor:
    """Returns a threshold that `count` to 2 * `count` magnitudes reach, or else a lower one.

    Bisection begins between the mean and the largest magnitude.
    """
    size = finite_size(ef.total())
    if not size.numel():
        return size.new_zeros(1)
    high = size.max().double()
    low = torch.minimum(size.mean(dtype=torch.float64), high)
    fits, middle = torch.zeros_like(low, dtype=torch.bool), low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reach = (size >= middle).sum()
        few, many = reach < count, reach > 2 * count
        high, low = torch.where(few, middle, high), torch.where(many, middle, low)
        fits = ~few & ~many
        if not size.is_cuda and bool(fits):
            break
    return torch.where(fits, middle, low).to(size.dtype).view(1)


def excess_threshold(ef: EFInput, stage_ratios: Sequence[float]) -> Tensor:
    """Returns the threshold of exponential tails fitted stage by stage; at most the maximum.

    A stage keeps a ratio of the entries before it: the threshold rises by -ln(ratio) mean excesses.
    """
    size = finite_size(ef.total())
    if not size.numel():
        return size.new_zeros(1)
    # Never above the largest, so that the next stage has entries to be fitted to.
    largest = size.max().double()
    threshold = torch.zeros_like(largest)
    for ratio in stage_ratios:
        least = threshold.to(size.dtype)
        reach = size >= least
        mean = torch.where(reach, size, 0).sum(dtype=torch.float64) / reach.sum()
        over = (mean - least).clamp_(min=0)
        threshold = torch.minimum(threshold - over * math.log(ratio), largest)
    return threshold.to(size.dtype).view(1)


def normal_threshold(ef: EFInput, deviations: float, count: int, rounds: int) -> Tensor:
    """Returns |mean| + `deviations` standard deviations, adjusted until about `count` reach it.

    Up to `rounds` times it is lowered if less than 2/3 of `count` do, and raised if more than 4/3
    do: halved or multiplied by 1.5 until there is a bound on either side, then by bisection. If
    that does not end, the lower bound is returned. It is at most the largest magnitude.
    """
    x = ef.total().nan_to_num(0.0, 0.0, 0.0)
    if not x.numel():
        return x.new_zeros(1)
    mean = x.mean(dtype=torch.float64)
    square = x.norm(dtype=torch.float64).square() / x.numel()
    threshold = mean.abs() + deviations * (square - mean.square()).clamp_min(0).sqrt()
    size = x.abs()
    low, high = torch.zeros_like(threshold), torch.full_like(threshold, torch.inf)
    fits = torch.zeros_like(threshold, dtype=torch.bool)
    for _ in range(rounds):
        reach = (size >= threshold).sum()
        few, many = 3 * reach < 2 * count, 3 * reach > 4 * count
        fits = ~few & ~many
        low, high = torch.where(many, threshold, low), torch.where(few, threshold, high)
        # Without a lower bound this halves the threshold.
        other = torch.where(high < torch.inf, (low + high) / 2, threshold * 1.5)
        threshold = torch.where(fits, threshold, other)
    threshold = torch.where(~fits & (low > 0) & (high < torch.inf), low, threshold)
    return torch.minimum(threshold, size.max().double()).to(size.dtype).view(1)
