"""Drift of parameters from a base (definition: kernels/reference/drift.py).

Tensors are processed in chunks that stay in the cache from one pass to the next.
"""

from collections.abc import Iterator

from gradwire.kernels.reference import drift as by_torch
from gradwire.kernels.specs import Drifted

STRETCH = 1 << 16


def depart(drifted: Drifted, ahead: float) -> None:
    for some in _stretches(drifted):
        by_torch.depart(some, ahead)


def arrive(drifted: Drifted, rate: float) -> None:
    for some in _stretches(drifted):
        by_torch.arrive(some, rate)


def relay(drifted: Drifted, rate: float, ahead: float) -> None:
    for some in _stretches(drifted):
        by_torch.relay(some, rate, ahead)


def _stretches(drifted: Drifted) -> Iterator[Drifted]:
    """The same stretch of a parameter in every list, one after the other."""
    for about in zip(*drifted, strict=True):
        for some in zip(*(one.split(STRETCH) for one in about), strict=True):
            yield Drifted(*([one] for one in some))
