"""Controllers on the mounts beside DDP, on four real processes."""

import control_integration_jobs as jobs
import pytest
import torch

from processes import Ranks

RULES = [
    "schedule:first=0.5,last=0.1,stages=3,length=6,after=1",
    "accordion:low=0.5,high=0.1,interval=1,epoch_steps=2",
    "autopilot",
    "gravac:low=4,high=64,epsilon=0.6,window=3,alpha=1",
]


@pytest.mark.parametrize("mount", jobs.MOUNTS)
def test_controllers_go_with_every_mount(four_ranks: Ranks, mount: str) -> None:
    for rule in RULES:
        results = four_ranks.run(jobs.led, mount, "topk:ratio=0.1", rule, timeout_s=55)
        weights, explained, after = zip(*results, strict=True)
        assert all(torch.equal(w, weights[0]) for w in weights)
        assert weights[0].isfinite().all()
        # Replicas of one shard are ranks 0 and 2; those of another decide for themselves.
        every = 2 if mount == "replicas" else 1
        assert all(one == explained[0] for one in explained[::every])
        assert len(set(after[::every])) == 1
        if rule == "autopilot":
            # In steps so short one look may be all that its share of them allows.
            assert explained[0]["settings"]
        else:
            assert len(explained[0]["decisions"]) > 1


def test_a_steered_reduce_scatter_is_still_one(four_ranks: Ranks) -> None:
    """Ranks hear of their own shards only, as they would without a controller."""
    for steered, plain in four_ranks.run(jobs.scattered_bytes, "schedule:last=0.1"):
        assert steered == plain
