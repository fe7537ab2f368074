"""Allocation: picks per-layer settings by the lowest error per second saved.

The settings of a layer are points of cost against error. Along the lower convex hull of these
points the error per second saved increases. Taking the hull steps of all layers in that order
visits the optimal allocations for every time budget, as a sweep over Lagrange multipliers would.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """A setting of a layer."""

    place: int
    """On the ladder."""
    cost_s: float
    lost: float


class Course(NamedTuple):
    """A setting for every layer, and what all of them take and lose together."""

    places: list[int]
    cost_s: float
    lost: float


class _Step(NamedTuple):
    price: float
    """What is lost for a second that is saved."""
    layer: int
    to: Option
    saved_s: float
    lost: float


def best_course(
    layers: Sequence[Sequence[Option]], judge: Callable[[float, float], float]
) -> Course:
    """Where `judge`, which is given what all layers take and lose, is least.

    Each layer's first option is the one that loses nothing, or the only one.
    """
    first = [options[0] for options in layers]
    steps = sorted(s for number, options in enumerate(layers) for s in _hull(number, options))
    cost_s, lost = sum(o.cost_s for o in first), sum(o.lost for o in first)
    best, length = judge(cost_s, lost), 0
    at = [(cost_s, lost)]
    for number, step in enumerate(steps, start=1):
        cost_s, lost = cost_s - step.saved_s, lost + step.lost
        at.append((cost_s, lost))
        if (value := judge(cost_s, lost)) < best:
            best, length = value, number
    places = [option.place for option in first]
    for step in steps[:length]:
        places[step.layer] = step.to.place
    return Course(places, *at[length])


def _hull(layer: int, options: Sequence[Option]) -> list[_Step]:
    """From a layer's first option down its lower convex hull, at ever higher prices."""
    found: list[_Step] = []
    here = options[0]
    while True:
        steps = [
            _Step((o.lost - here.lost) / (here.cost_s - o.cost_s), layer, o, *_change(here, o))
            for o in options
            if o.cost_s < here.cost_s
        ]
        if not steps:
            return found
        # Of those at the same price the furthest.
        best = min(steps, key=lambda s: (s.price, -s.saved_s))
        found.append(best)
        here = best.to


def _change(old: Option, new: Option) -> tuple[float, float]:
    return old.cost_s - new.cost_s, new.lost - old.lost
