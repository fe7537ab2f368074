"""Controllers with integrations other than DDP, on four real processes."""

import control_integration_jobs as jobs
import pytest
import torch

from processes import Ranks

CONTROLLERS = [
    "schedule:first=0.5,last=0.1,stages=3,length=6,after=1",
    "accordion:low=0.5,high=0.1,interval=1,epoch_steps=2",
    "autopilot",
    "gravac:low=4,high=64,epsilon=0.6,window=3,alpha=1",
]


@pytest.mark.parametrize("integration", jobs.INTEGRATIONS)
def test_controllers_work_with_every_integration(four_ranks: Ranks, integration: str) -> None:
    for controller in CONTROLLERS:
        results = four_ranks.run(
            jobs.controlled_run, integration, "topk:ratio=0.1", controller, timeout_s=55
        )
        weights, explained, after = zip(*results, strict=True)
        assert all(torch.equal(w, weights[0]) for w in weights)
        assert weights[0].isfinite().all()
        # Replicas of one shard are ranks 0 and 2; those of another decide for themselves.
        every = 2 if integration == "replicas" else 1
        assert all(one == explained[0] for one in explained[::every])
        assert len(set(after[::every])) == 1
        if controller == "autopilot":
            # Steps are so short that its overhead budget may allow a single update.
            assert explained[0]["settings"]
        else:
            assert len(explained[0]["decisions"]) > 1


def test_a_controlled_reduce_scatter_sends_no_more(four_ranks: Ranks) -> None:
    """Ranks receive only their own shards, as without a controller."""
    for controlled, plain in four_ranks.run(jobs.reduce_scatter_bytes, "schedule:last=0.1"):
        assert controlled == plain
