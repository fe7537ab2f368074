"""Keras on the torch backend."""

from collections.abc import Iterator

import pytest
import torch
from named_jobs import NamedJobs

from processes import Ranks


@pytest.fixture(scope="module")
def torch_ranks() -> Iterator[NamedJobs]:
    with pytest.MonkeyPatch.context() as patch, Ranks(2) as ranks:
        patch.setenv("KERAS_BACKEND", "torch")
        yield NamedJobs(ranks, "torch_backend_jobs")


@pytest.mark.parametrize("scaled", [False, True])
def test_fit(torch_ranks: NamedJobs, scaled: bool) -> None:
    (backend, weights, stats), (_, others, _) = torch_ranks.run("fit_job", "topk:ratio=0.1", scaled)
    assert backend == "torch"
    assert torch.equal(weights, others)
    assert weights.isfinite().all()
    assert stats["steps"] == 3
    assert stats["residual_norm"] > 0


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "qsgd:bits=4"])
def test_equal_gradients_give_the_means_without_keras(torch_ranks: NamedJobs, spec: str) -> None:
    assert torch_ranks.run("against_torch_job", spec, None) == [True, True]


@pytest.mark.parametrize(
    "controller",
    ["gravac:low=4,high=16,epsilon=0.3", "schedule:first=0.5,last=0.1,stages=2,length=2"],
)
def test_controllers_decide_as_without_keras(torch_ranks: NamedJobs, controller: str) -> None:
    assert torch_ranks.run("against_torch_job", "topk:ratio=0.1", controller) == [True, True]
