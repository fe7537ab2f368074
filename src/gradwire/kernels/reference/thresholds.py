"""Thresholds that about as many magnitudes reach as a sparsifier wants: one float32 each.

Each function adds the residual first, so `given.residual_out` then holds the sum. Non-finite entries count
as zero here; `reaching` selects them whatever the threshold is. Sums are float64 in an order of the
backend's choice, so thresholds may differ between backends by one unit in the last place.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.reference.random import strata
from gradwire.types import EFInput, Key

LOWERINGS = 10
"""How often a sampled border is lowered at most, to 0.8 of itself."""

HALVINGS = 20
"""Enough to cut the way from the mean to the largest magnitude into millionths."""


def finite_size(x: Tensor) -> Tensor:
    return x.abs().nan_to_num_(0.0, 0.0)


def sampled_border(given: EFInput, key: Key, tried: int, top: int, enough: int) -> Tensor:
    """The `top`-th largest of `tried` magnitudes drawn by `key`, lowered until `enough` reach it.

    Lowered by a fifth, ten times at most.
    """
    size = finite_size(given.total())
    if not size.numel():
        return size.new_zeros(1)
    place = strata(key, size.numel(), tried, size.device)
    border = size[place].topk(top, sorted=False).values.min().double()
    for _ in range(LOWERINGS):
        few = (size >= border).sum() < enough
        # Asking a GPU would make the host wait in every round; going on there changes nothing.
        if not size.is_cuda and not bool(few):
            break
        border = torch.where(few, 0.8 * border, border)
    return border.to(size.dtype).view(1)


def bisected_border(given: EFInput, count: int) -> Tensor:
    """A border that `count` to twice as many reach, or else the nearest lower one.

    Bisection begins between the mean and the largest magnitude.
    """
    size = finite_size(given.total())
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


def excess_border(given: EFInput, shares: Sequence[float]) -> Tensor:
    """The border that exponential tails lead to, stage by stage; at most the largest magnitude.

    Each stage keeps a share of those before it: the border rises by -ln(share) mean excesses.
    """
    size = finite_size(given.total())
    if not size.numel():
        return size.new_zeros(1)
    # Never above the largest, so that there is always something to fit the next stage to.
    largest = size.max().double()
    border = torch.zeros_like(largest)
    for share in shares:
        least = border.to(size.dtype)
        reach = size >= least
        mean = torch.where(reach, size, 0).sum(dtype=torch.float64) / reach.sum()
        over = (mean - least).clamp_(min=0)
        border = torch.minimum(border - over * math.log(share), largest)
    return border.to(size.dtype).view(1)


def normal_border(given: EFInput, spread: float, count: int, rounds: int) -> Tensor:
    """|mean| + `spread` standard deviations, moved until about `count` reach it.

    Up to `rounds` times it is halved where less than 2/3 of `count` do, or taken times 1.5 where
    more than 4/3 do; at most the largest magnitude.
    """
    x = given.total().nan_to_num(0.0, 0.0, 0.0)
    if not x.numel():
        return x.new_zeros(1)
    mean = x.mean(dtype=torch.float64)
    square = x.norm(dtype=torch.float64).square() / x.numel()
    border = mean.abs() + spread * (square - mean.square()).clamp_min(0).sqrt()
    size = x.abs()
    for _ in range(rounds):
        reach = (size >= border).sum()
        lower = torch.where(3 * reach < 2 * count, border / 2, border)
        border = torch.where(3 * reach > 4 * count, border * 1.5, lower)
    return torch.minimum(border, size.max().double()).to(size.dtype).view(1)
