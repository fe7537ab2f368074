"""The best mixture of settings for layers."""

import itertools
import math
import random

import pytest

from gradwire.control._autopilot.allocation import Option, best_course


def test_the_best_course_is_the_best_of_all_mixtures() -> None:
    """For any number of layers it is at a corner of the hull, and no mixture beats it by much."""
    rng = random.Random(0)
    for _ in range(20):
        layers = []
        for _ in range(4):
            times = sorted((rng.random() for _ in range(4)), reverse=True)
            losses = [0.0, *sorted(rng.random() for _ in range(3))]
            layers.append(
                [Option(p, t, x) for p, (t, x) in enumerate(zip(times, losses, strict=True))]
            )

        def judge(cost_s: float, lost: float) -> float:
            return (1 + cost_s) * (1 + lost)

        course = best_course(layers, judge)
        chosen = [options[p] for options, p in zip(layers, course.places, strict=True)]
        assert course.cost_s == pytest.approx(sum(o.cost_s for o in chosen))
        assert course.lost == pytest.approx(sum(o.lost for o in chosen))
        every = [
            judge(sum(o.cost_s for o in mixture), sum(o.lost for o in mixture))
            for mixture in itertools.product(*layers)
        ]
        assert min(every) <= judge(course.cost_s, course.lost) <= 1.1 * min(every)


def test_layers_that_lose_least_for_their_bytes_say_less_first() -> None:
    dense, same = Option(0, 1.0, 0.0), Option(0, 1.0, 0.0)
    easy, hard = Option(1, 0.1, 0.1), Option(1, 0.1, 0.8)
    for limit, places in ((0.05, [0, 0]), (0.2, [1, 0]), (1.0, [1, 1])):

        def judge(cost_s: float, lost: float, limit: float = limit) -> float:
            return cost_s if lost <= limit else math.inf

        assert best_course([[dense, easy], [same, hard]], judge).places == places
    # What takes as long and loses more is never chosen, nor what others surpass on both sides.
    poor = [dense, Option(1, 0.9, 0.9), Option(2, 0.2, 0.1), Option(3, 0.3, 0.5)]
    assert best_course([poor], lambda cost_s, lost: cost_s).places == [2]
