"""Aggregation of the gradients of all ranks: the mean, or a robust alternative."""

from itertools import combinations
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.errors import ConfigError

Aggregation: TypeAlias = Literal["mean", "majority", "median", "trimmed", "diameter"]


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
    if name == "mean":
        return gradients.mean(dim=0)
    if name == "majority":
        # A tie is zero, so an entry that no majority wants to move stays.
        return gradients.sign().sum(dim=0).sign()
    if name == "median":
        return _trimmed_mean(gradients, (ranks - 1) // 2)
    if name == "trimmed":
        return _trimmed_mean(gradients, trimmed_ranks(ranks))
    return _closest(gradients, trimmed_ranks(ranks)).mean(dim=0)


def _trimmed_mean(gradients: Tensor, trim: int) -> Tensor:
    """Returns the mean of each entry without its `trim` smallest and largest values."""
    return gradients.sort(dim=0).values[trim : gradients.shape[0] - trim].mean(dim=0)


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
