"""Allocation of settings to layers."""

import itertools
import math
import random

import pytest

from gradwire.control._autopilot.allocation import Option, best_allocation


def test_the_best_allocation_is_close_to_the_best_combination() -> None:
    """It is at a corner of the hull, and no combination is better by much."""
    rng = random.Random(0)
    for _ in range(20):
        layers = []
        for _ in range(4):
            times = sorted((rng.random() for _ in range(4)), reverse=True)
            errors = [0.0, *sorted(rng.random() for _ in range(3))]
            layers.append(
                [Option(p, t, x) for p, (t, x) in enumerate(zip(times, errors, strict=True))]
            )

        def objective(cost_s: float, error: float) -> float:
            return (1 + cost_s) * (1 + error)

        allocation = best_allocation(layers, objective)
        chosen = [options[p] for options, p in zip(layers, allocation.indices, strict=True)]
        assert allocation.cost_s == pytest.approx(sum(o.cost_s for o in chosen))
        assert allocation.error == pytest.approx(sum(o.error for o in chosen))
        every = [
            objective(sum(o.cost_s for o in combination), sum(o.error for o in combination))
            for combination in itertools.product(*layers)
        ]
        assert min(every) <= objective(allocation.cost_s, allocation.error) <= 1.1 * min(every)


def test_layers_with_the_least_error_per_second_are_compressed_first() -> None:
    dense, same = Option(0, 1.0, 0.0), Option(0, 1.0, 0.0)
    easy, hard = Option(1, 0.1, 0.1), Option(1, 0.1, 0.8)
    for limit, indices in ((0.05, [0, 0]), (0.2, [1, 0]), (1.0, [1, 1])):

        def objective(cost_s: float, error: float, limit: float = limit) -> float:
            return cost_s if error <= limit else math.inf

        assert best_allocation([[dense, easy], [same, hard]], objective).indices == indices
    # An option that is worse in both cost and error is never selected.
    poor = [dense, Option(1, 0.9, 0.9), Option(2, 0.2, 0.1), Option(3, 0.3, 0.5)]
    assert best_allocation([poor], lambda cost_s, error: cost_s).indices == [2]
