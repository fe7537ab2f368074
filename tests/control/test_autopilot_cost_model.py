"""What steps cost, learnt from laps."""

import pytest

from gradwire.control._autopilot.cost_model import Costs, Said
from gradwire.control.timing import StepTiming


def test_latency_is_told_from_bytes_by_a_change_of_setting() -> None:
    costs = Costs(1.5, 3)
    for _ in range(3):
        costs.add(Said(0, 1_000_000, {2: 10}), StepTiming(1.0, 0.0, 0.6, 5e6, 0.6))
    assert costs.link().byte_s == pytest.approx(0.6 / 5e6)
    for _ in range(3):
        costs.add(Said(0, 100_000, {3: 10}), StepTiming(0.5, 0.0, 0.15, 5e5, 0.15))
    assert costs.idle_s == pytest.approx(0.1)
    assert costs.link().byte_s == pytest.approx(1e-7)
    # Ranks send five bytes for one of a message, whatever was believed.
    assert costs.part_sent == pytest.approx(5)


def test_a_rank_that_is_alone_learns_nothing_of_a_link() -> None:
    costs = Costs(0.0, 0.0)
    for place in (2, 3):
        for _ in range(4):
            costs.add(Said(0, 1000 * place, {place: 10}), StepTiming(1.0, 0.1, 0.0, 0.0, 0.0))
    assert costs.idle_s is None
    assert costs.link().step_s(-0.05) == pytest.approx(1.0)


def test_the_work_of_a_mixture_is_put_down_to_its_settings() -> None:
    costs = Costs(1.5, 3)
    costs.add(Said(0, 10, {2: 100}), StepTiming(1.0, 0.4, 0.0, 10.0, 0.4))
    costs.add(Said(10, 5, {0: 50, 2: 50}), StepTiming(1.0, 0.1, 0.0, 10.0, 0.1))
    # All that is said needs no encoding as far as is known, so the rest has become faster.
    assert costs.element_s == pytest.approx({0: 0.0, 2: 0.002})
    assert costs.work_s(5, 1000) == pytest.approx(2.0)
    assert costs.work_s(1, 1000) == 0


def test_what_is_hidden_behind_the_computation_costs_nothing() -> None:
    costs = Costs(1.5, 3)
    for _ in range(5):
        costs.add(Said(0, 10, {2: 10}), StepTiming(1.0, 0.2, 0.4, 1e6, 0.0))
    link = costs.link()
    assert link.step_s(-0.3) == pytest.approx(1.0)
    # What would be more than now is not known to be hidden.
    assert link.step_s(0.4) == pytest.approx(1.4)
