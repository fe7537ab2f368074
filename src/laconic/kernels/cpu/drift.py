"""Parameters that have drifted from a base (the meaning: kernels/reference/drift.py).

By stretches that stay in the cache from one pass to the next.
"""

from collections.abc import Iterator

from torch import Tensor

from laconic.kernels.reference import drift as by_torch

STRETCH = 1 << 16


def depart(here: list[Tensor], base: list[Tensor], drift: list[Tensor], ahead: float) -> None:
    for h, b, d in _stretches(here, base, drift):
        by_torch.depart([h], [b], [d], ahead)


def arrive(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    mean: list[Tensor],
    rate: float,
) -> None:
    for h, b, a, m in _stretches(here, base, anchor, mean):
        by_torch.arrive([h], [b], [a], [m], rate)


def relay(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    drift: list[Tensor],
    rate: float,
    ahead: float,
) -> None:
    for h, b, a, d in _stretches(here, base, anchor, drift):
        by_torch.relay([h], [b], [a], [d], rate, ahead)


def _stretches(*lists: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of a parameter in every list, one after the other."""
    for about in zip(*lists, strict=True):
        yield from zip(*(one.split(STRETCH) for one in about), strict=True)
