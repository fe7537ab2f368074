"""The trait `propagates_nonfinite`: the first message is non-finite iff an entry is."""

import pytest
import torch
from catalogue import Case, legal_cases, run_step, usual_cases
from torch import Tensor

from gradwire.engine.nonfinite import NonFiniteGuard
from gradwire.engine.step import Lane, lane_rounds

SHAPE = (61, 40)
BAD = [float("nan"), float("inf"), float("-inf")]


def propagating(cases: list[Case]) -> list[Case]:
    like = torch.zeros(SHAPE)
    return [case for case in cases if case.lanes(like)[0].aggregator.propagates_nonfinite]


def gradient(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def lane_with_state(case: Case) -> Lane:
    """Returns a lane that has state."""
    lanes = case.lanes(torch.zeros(SHAPE))
    run_step(lanes, [gradient(rank) for rank in range(len(lanes))])
    return lanes[1]


def is_raised(lane: Lane, grad: Tensor) -> bool:
    """Returns whether a guard that checks the first message only raises its flag."""
    guard = NonFiniteGuard([grad], [lane])
    guard.begin()
    guard.requests({0: next(lane_rounds(grad.clone(), lane))})
    lane.discard()
    return bool(guard.flag)


def check(lane: Lane, base: Tensor) -> None:
    assert not is_raised(lane, base)
    for number, bad in enumerate(BAD):
        for place in (number, base.numel() // 2, base.numel() - 1):
            grad = base.clone()
            grad.view(-1)[place] = bad
            assert is_raised(lane, grad), f"{bad} at {place}"
    mixed = base.clone()
    mixed.view(-1)[5:8] = torch.tensor(BAD)
    assert is_raised(lane, mixed)
    assert is_raised(lane, torch.full(SHAPE, BAD[0]))


@pytest.mark.parametrize("case", propagating(usual_cases()), ids=str)
def test_every_method_with_the_trait_propagates_non_finite_entries(case: Case) -> None:
    lane = lane_with_state(case)
    check(lane, gradient(9))
    check(lane, torch.zeros(SHAPE))


@pytest.mark.parametrize("case", propagating(legal_cases()), ids=str)
def test_with_every_memory_and_exchange(case: Case) -> None:
    lane, grad = lane_with_state(case), gradient(9)
    grad[7, 7] = BAD[1]
    assert is_raised(lane, grad)


def test_most_methods_do() -> None:
    assert len(propagating(usual_cases())) > len(usual_cases()) / 2
