"""Recovery of a local run from a non-finite gradient, which costs the syncs it affects."""

import pytest
import torch
from local_jobs import METHODS
from local_workers import SimulatedRun
from nonfinite_jobs import recovered, resumed_differences, saving_changes_nothing
from torch import nn

from gradwire.local import LocalSGD
from processes import Ranks

RAISED = {
    "qsparse-2-0-1": [8],
    "qsparse-1-1-1": [8],
    "qsparse-2-1-1": [9],
    "qsparse-2-2-1": [10],
    "diloco-2-2-1": [10],
    # The parameters of both fragments are affected, which are synchronised in turn.
    "diloco-4-2-2": [10, 12],
    "diloco-4-4-2": [12, 14],
    "cser-pl": [8],
}


@pytest.mark.parametrize("name", RAISED)
def test_workers_recover_and_agree(four_ranks: Ranks, name: str) -> None:
    results = four_ranks.run(recovered, name)
    for raised, agreed, weights in results:
        assert raised == RAISED[name]
        assert weights.isfinite().all()
        assert torch.equal(agreed, results[0][1])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_saving_a_state_changes_nothing(four_ranks: Ranks, name: str) -> None:
    """At every step, in a run with a sync that fails where the method can detect it."""
    assert four_ranks.run(saving_changes_nothing, name) == [""] * 4


@pytest.mark.parametrize("name", ["diloco-delayed", "qsparse-delayed", "streaming"])
def test_resumes_bitwise_around_a_failed_sync(four_ranks: Ranks, name: str) -> None:
    assert four_ranks.run(resumed_differences, name) == [{}] * 4


@pytest.mark.parametrize("name", ["steps", "engines", "tensors", "seed"])
def test_parameters_may_have_any_name(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        found = nn.Sequential(nn.Linear(40, 32))
        found.register_parameter(name, nn.Parameter(torch.zeros(4, 4)))
        return found

    with SimulatedRun(LocalSGD, model=model, sync_every=2) as run:
        run.train(3)
    again = SimulatedRun(LocalSGD, model=model, sync_every=2)
    again.workers[1].load_state_dict(run.workers[1].state_dict())
    assert again.workers[1].steps == 3
