"""Robust centers of rows, one per rank, all of which have a bounded influence."""

import torch
from torch import Tensor

WEISZFELD_STEPS = 16
"""Steps towards the geometric median; each costs about two passes over all rows."""

CLIPPINGS = 3
"""Steps of centered clipping."""

SMOOTHING = 1e-6
"""A row nearer than this share of the median distance counts as that near."""


def trimmed_mean(gradients: Tensor, trim: int) -> Tensor:
    """Returns the mean of each entry without its `trim` smallest and largest values."""
    if not trim:
        return gradients.mean(dim=0)
    return gradients.sort(dim=0).values[trim : gradients.shape[0] - trim].mean(dim=0)


def geometric_median(gradients: Tensor) -> Tensor:
    """Returns the point with the least sum of distances to all rows, by Weiszfeld's steps.

    Smoothed as by Pillutla, Kakade & Harchaoui 2019; the first point is the median of each entry.
    """
    center = _median(gradients)
    for _ in range(WEISZFELD_STEPS):
        steps, distances = _offsets(gradients, center)
        least = (SMOOTHING * _median_of(distances)).clamp(min=torch.finfo(distances.dtype).tiny)
        weights = least / torch.maximum(distances, least)
        center = center + (weights / weights.sum()) @ steps
    return center


def clipped_mean(gradients: Tensor) -> Tensor:
    """Returns a center plus the mean of the rows' offsets from it, the long ones cut (centered
    clipping, Karimireddy, He & Jaggi 2021).

    The first center is the median of each entry, and an offset is cut to the median length of all:
    the paper keeps the center of the step before, and has a length to be tuned.
    """
    center = _median(gradients)
    for _ in range(CLIPPINGS):
        steps, distances = _offsets(gradients, center)
        tiny = torch.finfo(distances.dtype).tiny
        scales = (_median_of(distances) / distances.clamp(min=tiny)).clamp(max=1)
        center = center + (scales / len(gradients)) @ steps
    return center


def _median(gradients: Tensor) -> Tensor:
    """Returns the median of each entry: of an even number, the mean of the middle two."""
    return trimmed_mean(gradients, (gradients.shape[0] - 1) // 2)


def _offsets(gradients: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows minus the center, and their lengths.

    A row that is not finite, or too far for its distance to be, has an offset of zero and an
    infinite length, so that its weight is zero.
    """
    offsets = gradients - center
    lengths = torch.linalg.vector_norm(offsets, dim=1)
    lengths = lengths.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return offsets.where(lengths.isfinite()[:, None], 0.0), lengths


def _median_of(lengths: Tensor) -> Tensor:
    """Returns the lower median, which is finite if most are."""
    return lengths.kthvalue((len(lengths) + 1) // 2).values
