"""Aggregation of the gradients of all ranks: the mean, or an alternative to it."""

from itertools import combinations
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.errors import ConfigError

Aggregation: TypeAlias = Literal[
    "mean", "majority", "median", "trimmed", "diameter", "median_norm", "coincident"
]


def check_aggregation(name: str) -> None:
    """Raises ConfigError unless there is an aggregation of this name."""
    if name not in get_args(Aggregation):
        known = list(get_args(Aggregation))
        raise ConfigError(f"gather: aggregate must be one of {known}, got {name!r}")


def trimmed_ranks(ranks: int) -> int:
    """Returns how many faulty ranks the trimmed aggregations assume: a quarter, at least one."""
    return min(max(1, ranks // 4), (ranks - 1) // 2)


def tolerated(name: str, ranks: int) -> int:
    """Returns how many ranks may send anything, NaN included, without effect on the result."""
    if name == "median":
        return (ranks - 1) // 2
    return trimmed_ranks(ranks) if name in ("trimmed", "diameter") else 0


def aggregate(gradients: Tensor, name: Aggregation) -> Tensor:
    """Combines the rows of `gradients`, one per rank; bitwise the same on every rank."""
    ranks = gradients.shape[0]
    if name in ("mean", "median_norm"):
        rows = gradients if name == "mean" else _within_median_norm(gradients)
        return rows.mean(dim=0)
    if name == "majority":
        # A tie is zero, so an entry that no majority wants to move stays.
        return gradients.sign().sum(dim=0).sign()
    if name == "coincident":
        # Sparse messages hold few entries in common, and zeros stand for what was not sent.
        return gradients.sum(dim=0) / (gradients != 0).sum(dim=0).clamp(min=1)
    if name in ("median", "trimmed"):
        trim = (ranks - 1) // 2 if name == "median" else trimmed_ranks(ranks)
        return _trimmed_mean(gradients, trim)
    return _closest(gradients, trimmed_ranks(ranks)).mean(dim=0)


def _trimmed_mean(gradients: Tensor, trim: int) -> Tensor:
    """Returns the mean of each entry without its `trim` smallest and largest values."""
    return gradients.sort(dim=0).values[trim : gradients.shape[0] - trim].mean(dim=0)


def _within_median_norm(gradients: Tensor) -> Tensor:
    """Returns the rows, of which those above the median norm are scaled down to it.

    Of an even number of norms the median is the lower of the two in the middle (Sarfi et al. 2025).
    """
    norms = torch.linalg.vector_norm(gradients, dim=1)
    # A norm of zero divides its own zeros by the least positive number.
    limits: Tensor = norms.median() / norms.clamp(min=torch.finfo(norms.dtype).tiny)
    return gradients * limits.clamp(max=1).unsqueeze(1)


def _closest(gradients: Tensor, excluded: int) -> Tensor:
    """Returns all rows but `excluded`: the subset of smallest diameter.

    Mhamdi, Guerraoui & Rouault 2018. With more than 12 ranks there are too many subsets, and each
    row's nearest neighbours are the candidates.
    """
    ranks = gradients.shape[0]
    distance = torch.cdist(gradients, gradients)
    size = ranks - excluded
    if ranks <= 12:
        subsets = [list(subset) for subset in combinations(range(ranks), size)]
    else:
        subsets = [distance[row].argsort()[:size].sort().values.tolist() for row in range(ranks)]
    # A row with NaN is infinitely far away.
    distance = distance.nan_to_num(nan=float("inf"))
    diameters = [float(distance[subset][:, subset].max()) for subset in subsets]
    return gradients[subsets[diameters.index(min(diameters))]]
