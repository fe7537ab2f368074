"""Allocation: picks per-layer settings by the lowest error per second saved.

The settings of a layer are points of cost against error. Along the lower convex hull of these
points the error per second saved increases. Taking the hull steps of all layers in that order
visits the optimal allocations for every time budget, as a sweep over Lagrange multipliers would.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """A setting of a layer, with its cost and compression error."""

    grid_index: int
    cost_s: float
    error: float


class Allocation(NamedTuple):
    """A setting for every layer, with the total cost and error."""

    indices: list[int]
    cost_s: float
    error: float


class _HullStep(NamedTuple):
    error_per_s: float
    """Error added for each second saved."""
    layer: int
    to: Option
    saved_s: float
    error: float


def best_allocation(
    layers: Sequence[Sequence[Option]], objective: Callable[[float, float], float]
) -> Allocation:
    """Returns the allocation that minimises `objective(total cost, total error)`.

    Each layer's first option must be the one without error, or the only one.
    """
    first = [options[0] for options in layers]
    steps = sorted(s for number, options in enumerate(layers) for s in _hull(number, options))
    cost_s, error = sum(o.cost_s for o in first), sum(o.error for o in first)
    best, length = objective(cost_s, error), 0
    totals = [(cost_s, error)]
    for number, step in enumerate(steps, start=1):
        cost_s, error = cost_s - step.saved_s, error + step.error
        totals.append((cost_s, error))
        if (value := objective(cost_s, error)) < best:
            best, length = value, number
    indices = [option.grid_index for option in first]
    for step in steps[:length]:
        indices[step.layer] = step.to.grid_index
    return Allocation(indices, *totals[length])


def _hull(layer: int, options: Sequence[Option]) -> list[_HullStep]:
    """Returns the steps along the lower convex hull, from the first option to the cheapest."""
    found: list[_HullStep] = []
    here = options[0]
    while True:
        steps = [_hull_step(layer, here, o) for o in options if o.cost_s < here.cost_s]
        if not steps:
            return found
        # At equal slopes, take the longest step.
        best = min(steps, key=lambda s: (s.error_per_s, -s.saved_s))
        found.append(best)
        here = best.to


def _hull_step(layer: int, old: Option, new: Option) -> _HullStep:
    saved_s, error = old.cost_s - new.cost_s, new.error - old.error
    return _HullStep(error / saved_s, layer, new, saved_s, error)
