"""`gradwire.comm_hook`: torch's own way to register, which trains as `attach` does."""

import comm_hook_jobs as jobs
import pytest
import torch

from processes import Ranks

TEXTS = [
    "comm_hook: pass the DistributedDataParallel too, comm_hook(method, model)",
    "expected a DistributedDataParallel, got Linear",
    "comm_hook: the hook is not registered with this model, so its gradients would not",
    "attach: this model has a link already",
    "comm_hook: this state belongs to another model",
    "comm_hook: this model has Gradwire's hook already, which cannot be registered twice",
    "the model's only hook slot is taken by allreduce_hook",
]


@pytest.mark.parametrize("method", [jobs.POLICIES, "topk:ratio=0.1"])
def test_a_registered_hook_trains_as_attach_does(two_ranks: Ranks, method: str) -> None:
    results = two_ranks.run(jobs.registered, method)
    for ours, expected, stats in results:
        assert torch.equal(ours, expected)
        assert torch.equal(ours, results[0][0])
        assert stats["steps"] == 3


def test_what_it_cannot_do_is_named(two_ranks: Ranks) -> None:
    for found in two_ranks.run(jobs.refusals):
        assert len(found) == len(TEXTS)
        for text, error in zip(TEXTS, found, strict=True):
            assert text in error
