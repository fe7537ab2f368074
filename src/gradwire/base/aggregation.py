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


def tolerated_faults(ranks: int) -> int:
    """How many lying ranks the robust aggregations bear: a quarter, rounded down, at least one."""
    return min(max(1, ranks // 4), (ranks - 1) // 2)


def borne(name: str, ranks: int) -> int:
    """How many of the ranks may say anything at all, NaN included, and are left out."""
    if name == "median":
        return (ranks - 1) // 2
    return tolerated_faults(ranks) if name in ("trimmed", "diameter") else 0


def aggregate(said: Tensor, name: Aggregation) -> Tensor:
    """One gradient of the rows of `said`, one a rank; the same on every rank, to the bit."""
    if name == "mean":
        return said.mean(dim=0)
    if name == "majority":
        # A tie is zero, so entries that nobody wants to move stay where they are.
        return said.sign().sum(dim=0).sign()
    if name == "median":
        return _middle(said, (said.shape[0] - 1) // 2)
    if name == "trimmed":
        return _middle(said, tolerated_faults(said.shape[0]))
    return _closest(said, tolerated_faults(said.shape[0])).mean(dim=0)


def _middle(said: Tensor, trim: int) -> Tensor:
    """The mean of what is left without the `trim` smallest and largest of every entry."""
    return said.sort(dim=0).values[trim : said.shape[0] - trim].mean(dim=0)


def _closest(said: Tensor, out: int) -> Tensor:
    """All rows but `out`: those whose largest distance from each other is smallest.

    Mhamdi, Guerraoui & Rouault 2018. With many ranks there are too many ways to choose, and each
    row's nearest neighbours stand for them.
    """
    ranks = said.shape[0]
    apart = torch.cdist(said, said)
    keep = ranks - out
    if ranks <= 12:
        ways = [list(way) for way in combinations(range(ranks), keep)]
    else:
        ways = [apart[row].argsort()[:keep].sort().values.tolist() for row in range(ranks)]
    # Who says what is no number is as far away as can be.
    apart = apart.nan_to_num(nan=float("inf"))
    widths = [float(apart[way][:, way].max()) for way in ways]
    return said[ways[widths.index(min(widths))]]
