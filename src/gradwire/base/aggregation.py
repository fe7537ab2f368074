"""Aggregation of the gradients of all ranks: the mean, or an alternative to it.

The robust ones assume that at most `faulty` ranks send anything at all, and need so many ranks that
these are outvoted.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.base.robust_center import clipped_mean, geometric_median, trimmed_mean
from gradwire.base.robust_selection import closest_subset, krum_order, mix_with_nearest
from gradwire.checks import check_flag, check_whole
from gradwire.errors import ConfigError

Aggregation: TypeAlias = Literal[
    "mean",
    "majority",
    "median",
    "trimmed",
    "diameter",
    "median_norm",
    "coincident",
    "krum",
    "multi_krum",
    "geometric_median",
    "clipped",
]

ROBUST: Mapping[Aggregation, int] = {
    "median": 1,
    "trimmed": 1,
    "diameter": 1,
    "krum": 3,
    "multi_krum": 3,
    "geometric_median": 1,
    "clipped": 1,
}
"""The aggregations that tolerate faulty ranks, with the ranks needed beyond twice as many."""

UNKNOWN = -1
"""The number of faulty ranks that leaves it to the aggregation, see `assumed_faulty`."""


def check_aggregation(name: str, faulty: int = UNKNOWN, mix: bool = False) -> None:
    """Raises ConfigError unless there is an aggregation of this name with these settings."""
    if name not in get_args(Aggregation):
        known = list(get_args(Aggregation))
        raise ConfigError(f"gather: aggregate must be one of {known}, got {name!r}")
    check_whole("gather", "faulty", faulty, UNKNOWN)
    check_flag("gather", "mix", mix)
    if name not in ROBUST and (faulty != UNKNOWN or mix):
        setting = f"faulty={faulty}" if faulty != UNKNOWN else "mix=true"
        raise ConfigError(
            f"gather: {setting} is a setting of the robust aggregations {[*ROBUST]}, got "
            f"aggregate={name!r}"
        )


def least_ranks(name: str, faulty: int = UNKNOWN) -> int:
    """Returns how many ranks an aggregation needs against so many faulty ones."""
    beyond = {str(key): value for key, value in ROBUST.items()}
    if faulty == UNKNOWN or name not in beyond:
        return 1
    return 2 * faulty + beyond[name]


def check_ranks(name: str, ranks: int, faulty: int = UNKNOWN) -> None:
    """Raises ConfigError if so many faulty ranks can outvote the others."""
    least = least_ranks(name, faulty)
    if ranks < least:
        raise ConfigError(
            f"gather: aggregate={name} with faulty={faulty} needs at least "
            f"2 * {faulty} + {least - 2 * faulty} = {least} ranks, got {ranks}"
        )


def trimmed_ranks(ranks: int) -> int:
    """Returns how many faulty ranks the trimmed aggregations assume: a quarter, at least one."""
    return min(max(1, ranks // 4), (ranks - 1) // 2)


def assumed_faulty(name: str, ranks: int, faulty: int = UNKNOWN) -> int:
    """Returns how many faulty ranks a robust aggregation assumes: `faulty`, if that is known.

    Otherwise as many as a median tolerates, and a quarter of the ranks for all others.
    """
    if faulty != UNKNOWN:
        return faulty
    if name in ("median", "geometric_median"):
        return (ranks - 1) // 2
    if name in ("krum", "multi_krum"):
        return max(0, min(trimmed_ranks(ranks), (ranks - 3) // 2))
    return trimmed_ranks(ranks)


def tolerated(name: str, ranks: int, faulty: int = UNKNOWN) -> int:
    """Returns how many ranks may send anything, NaN included, without effect on the result."""
    robust = {str(key) for key in ROBUST}
    return assumed_faulty(name, ranks, faulty) if name in robust else 0


def aggregate(
    gradients: Tensor, name: Aggregation, faulty: int = UNKNOWN, mix: bool = False
) -> Tensor:
    """Combines the rows of `gradients`, one per rank; bitwise the same on every rank.

    With `mix` every row is first replaced by the mean of its nearest rows.
    """
    if name == "mean":
        return gradients.mean(dim=0)
    if name == "median_norm":
        return _within_median_norm(gradients).mean(dim=0)
    if name == "majority":
        # A tie is zero, so an entry that no majority wants to move stays.
        return gradients.sign().sum(dim=0).sign()
    if name == "coincident":
        # Sparse messages hold few entries in common, and zeros stand for what was not sent.
        return gradients.sum(dim=0) / (gradients != 0).sum(dim=0).clamp(min=1)
    excluded = assumed_faulty(name, gradients.shape[0], faulty)
    rows = mix_with_nearest(gradients, excluded) if mix else gradients
    return _robust(rows, name, excluded)


def _robust(gradients: Tensor, name: Aggregation, faulty: int) -> Tensor:
    """Combines the rows, of which `faulty` may hold anything."""
    ranks = gradients.shape[0]
    if name == "median":
        return trimmed_mean(gradients, (ranks - 1) // 2)
    if name == "trimmed":
        return trimmed_mean(gradients, faulty)
    if name == "diameter":
        return gradients[closest_subset(gradients, faulty)].mean(dim=0)
    if name == "krum":
        return gradients[krum_order(gradients, faulty)[0]]
    if name == "multi_krum":
        return gradients[sorted(krum_order(gradients, faulty)[: ranks - faulty])].mean(dim=0)
    return geometric_median(gradients) if name == "geometric_median" else clipped_mean(gradients)


def _within_median_norm(gradients: Tensor) -> Tensor:
    """Returns the rows, of which those above the median norm are scaled down to it.

    Of an even number of norms the median is the lower of the two in the middle (Sarfi et al. 2025).
    """
    norms = torch.linalg.vector_norm(gradients, dim=1)
    # A norm of zero divides its own zeros by the least positive number.
    limits: Tensor = norms.median() / norms.clamp(min=torch.finfo(norms.dtype).tiny)
    return gradients * limits.clamp(max=1).unsqueeze(1)
