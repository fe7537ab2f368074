"""What a compressed gradient keeps of a gradient, and how fast training would be for it."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, TypeAlias

import torch
from torch import Tensor

GainNorm: TypeAlias = Literal["l2sq", "l2", "layer_l2"]
"""l2sq: sums of squares. l2: norms of the whole gradient. layer_l2: sums of each tensor's norm."""
GainRef: TypeAlias = Literal["ef", "raw"]
"""What is compared with: the gradient with the residual added, or as it came."""
Smoothing: TypeAlias = Literal["ewma", "median"]

LATEST = 101
"""A median is that of so many values at most."""


def folded(squares: Sequence[Tensor], norm: GainNorm) -> list[Tensor]:
    """One message's sums over tensors, of squares or of norms; `squares` is [4] a tensor."""
    table = torch.stack(list(squares))  # [tensors, 4]
    return list((table.sqrt() if norm == "layer_l2" else table).sum(0))


def gain(kept: float, reference: float, norm: GainNorm) -> float:
    """What is kept of the reference, from agreed sums; 1 where there is nothing to keep."""
    if reference == 0:
        return 1.0
    return math.sqrt(kept / reference) if norm == "l2" else kept / reference


def smoothed(old: float | None, new: float, alpha: float) -> float:
    """The exponentially weighted moving average, which starts at the first value."""
    return new if old is None else alpha * new + (1 - alpha) * old


def noted(old: Sequence[float], new: float, alpha: float, how: Smoothing) -> list[float]:
    """What is remembered of a factor's throughput; `level` reads it."""
    if how == "median":
        return [*old, new][-LATEST:]
    return [smoothed(old[0] if old else None, new, alpha)]


def level(values: Sequence[float]) -> float:
    return median(values)


def saturated(throughput: dict[float, float], omega: float) -> float | None:
    """The lower of the two factors of greatest throughput, where that differs by omega at most.

    The dense entry, factor 1, does not take part.
    """
    ranked = sorted((value, factor) for factor, value in throughput.items() if factor != 1)
    if len(ranked) < 2:
        return None
    (second, one), (first, other) = ranked[-2:]
    return min(one, other) if first - second <= omega * second else None
