"""Robust selections: which rows, one per rank, are close enough to others to be trusted.

Rows with a non-finite entry are infinitely far from all others. Ties go to the lower rank, so that
all ranks select the same rows.
"""

from functools import lru_cache
from itertools import combinations
from math import comb

import torch
from torch import Tensor

MOST_SUBSETS = 5000
"""With more subsets than this only sets of nearest rows are tried."""


def squared_distances(gradients: Tensor) -> Tensor:
    """Returns the squared distances of all pairs of rows; infinite where one is not finite."""
    # A product of matrices would lose small distances between large rows.
    exact = torch.cdist(gradients, gradients, compute_mode="donot_use_mm_for_euclid_dist")
    return exact.square().nan_to_num(nan=float("inf"), posinf=float("inf"))


def closest_subset(gradients: Tensor, faulty: int) -> list[int]:
    """Returns all rows but `faulty` of them: the subset of smallest diameter.

    Mhamdi, Guerraoui & Rouault 2018. Where there are too many subsets, each row's nearest
    neighbours are the candidates, and the diameter is at most twice the smallest.
    """
    ranks = gradients.shape[0]
    if not faulty:
        return list(range(ranks))
    distances = squared_distances(gradients)
    size = ranks - faulty
    if comb(ranks, faulty) <= MOST_SUBSETS:
        subsets = _subsets(ranks, size).to(gradients.device)
    else:
        subsets = distances.argsort(dim=1, stable=True)[:, :size].sort(dim=1).values
    diameters = distances[subsets[:, :, None], subsets[:, None, :]].flatten(1).amax(dim=1).tolist()
    chosen: list[int] = subsets[diameters.index(min(diameters))].tolist()
    return chosen


@lru_cache(maxsize=8)
def _subsets(ranks: int, size: int) -> Tensor:
    """Returns all subsets of `size` ranks in lexicographic order, [subsets, size]."""
    return torch.tensor(list(combinations(range(ranks), size)))


def krum_order(gradients: Tensor, faulty: int) -> list[int]:
    """Returns the rows by score, the best first (Blanchard et al. 2017).

    The score is the sum of the squared distances to the N - `faulty` - 2 nearest other rows.
    """
    ranks = gradients.shape[0]
    nearest = max(0, min(ranks - 1, max(1, ranks - faulty - 2)))
    distances = squared_distances(gradients).fill_diagonal_(float("inf"))
    scores = distances.sort(dim=1).values[:, :nearest].sum(dim=1)
    order: list[int] = scores.argsort(stable=True).tolist()
    return order


def mix_with_nearest(gradients: Tensor, faulty: int) -> Tensor:
    """Returns every row's mean with its nearest, N - `faulty` in all (Allouah et al. 2023)."""
    size = gradients.shape[0] - faulty
    nearest = squared_distances(gradients).argsort(dim=1, stable=True)[:, :size]
    return torch.stack([gradients[chosen.sort().values].mean(dim=0) for chosen in nearest])
