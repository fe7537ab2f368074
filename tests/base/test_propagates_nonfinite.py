"""The trait `propagates_nonfinite` with every memory and exchange.

`gradwire.testing.exchanges.first_message_shows_nonfinite` tests it in usual cases.
"""

import pytest
import torch
from catalogue import legal_cases, usual_cases

from gradwire.testing.case import Case, gradients, run_step
from gradwire.testing.exchanges import is_flagged

SHAPE = (61, 40)


def propagating(cases: list[Case]) -> list[Case]:
    like = torch.zeros(SHAPE)
    return [case for case in cases if case.lanes(like)[0].aggregator.propagates_nonfinite]


@pytest.mark.parametrize("case", propagating(legal_cases()), ids=str)
def test_with_every_memory_and_exchange(case: Case) -> None:
    lanes = case.lanes(torch.zeros(SHAPE))
    run_step(lanes, gradients(SHAPE, ranks=case.ranks))
    grad = gradients(SHAPE, 9)[0]
    grad[7, 7] = float("inf")
    assert is_flagged(lanes[1], grad)


def test_most_methods_do() -> None:
    assert len(propagating(usual_cases())) > len(usual_cases()) / 2
