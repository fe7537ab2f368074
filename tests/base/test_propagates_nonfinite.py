"""What `propagates_nonfinite` promises: the first message is not finite where any entry is not, and only there."""

import pytest
import torch
from catalogue import Case, legal_cases, run_step, usual_cases
from torch import Tensor

from gradwire.engine.nonfinite import NonFiniteGuard
from gradwire.engine.step import Lane, exchange

SHAPE = (61, 40)
BAD = [float("nan"), float("inf"), float("-inf")]


def showing(cases: list[Case]) -> list[Case]:
    like = torch.zeros(SHAPE)
    return [case for case in cases if case.lanes(like)[0].aggregator.propagates_nonfinite]


def gradient(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def begun(case: Case) -> Lane:
    """A lane that remembers something."""
    lanes = case.lanes(torch.zeros(SHAPE))
    run_step(lanes, [gradient(rank) for rank in range(len(lanes))])
    return lanes[1]


def is_raised(lane: Lane, grad: Tensor) -> bool:
    """Whether who looks at the first message alone sees something."""
    alarm = NonFiniteGuard([grad], [True])
    alarm.asks({0: next(exchange(grad.clone(), lane))})
    lane.forget()
    return bool(alarm.raised)


def check(lane: Lane, around: Tensor) -> None:
    assert not is_raised(lane, around)
    for number, bad in enumerate(BAD):
        for place in (number, around.numel() // 2, around.numel() - 1):
            grad = around.clone()
            grad.view(-1)[place] = bad
            assert is_raised(lane, grad), f"{bad} at {place}"
    mixed = around.clone()
    mixed.view(-1)[5:8] = torch.tensor(BAD)
    assert is_raised(lane, mixed)
    assert is_raised(lane, torch.full(SHAPE, BAD[0]))


@pytest.mark.parametrize("case", showing(usual_cases()), ids=str)
def test_every_method_that_says_so_shows_what_is_not_finite(case: Case) -> None:
    lane = begun(case)
    check(lane, gradient(9))
    check(lane, torch.zeros(SHAPE))


@pytest.mark.parametrize("case", showing(legal_cases()), ids=str)
def test_with_every_memory_and_exchange(case: Case) -> None:
    lane, grad = begun(case), gradient(9)
    grad[7, 7] = BAD[1]
    assert is_raised(lane, grad)


def test_most_methods_do() -> None:
    assert len(showing(usual_cases())) > len(usual_cases()) / 2
