"""Controllers on four real processes."""

import control_jobs as jobs
import torch

from processes import Ranks

RULES = [
    "schedule:first=0.5,last=0.1,stages=3,length=6,after=1",
    "accordion:low=0.5,high=0.1,interval=1,epoch_steps=2",
    "autopilot",
    "gravac:low=4,high=64,epsilon=0.6,window=3,alpha=1",
]


def test_ranks_decide_the_same_and_stay_equal(four_ranks: Ranks) -> None:
    """By the wall clock too: GraVAC's throughputs are measured, and yet equal on all ranks."""
    for rule in RULES:
        # The first call waits until four processes have started.
        results = four_ranks.run(jobs.led, "topk:ratio=0.1", rule, 6, timeout_s=55)
        weights, explained = zip(*results, strict=True)
        assert all(torch.equal(w, weights[0]) for w in weights)
        assert weights[0].isfinite().all()
        assert all(one == explained[0] for one in explained)
        # In steps so short one look may be all that Autopilot's share of them allows.
        decisions = explained[0]["decisions"]
        assert explained[0]["settings"] if rule == "autopilot" else len(decisions) > 1
    assert explained[0]["throughput"]
    assert all(value > 0 for value in explained[0]["throughput"].values())


def test_different_controllers_are_found_out_at_once(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.different, 20):
        assert "controller" in text
        assert "ranks are set up differently" in text


def test_batches_grow_where_gradients_are_calm(four_ranks: Ranks) -> None:
    """Nothing is compressed: what is saved are the exchanges of batches that are accumulated."""
    results = four_ranks.run(jobs.accumulated, 48, timeout_s=55)
    for weights, taken in results:
        assert torch.equal(weights, results[0][0])
        # Two epochs of 8 batches to compare, and the step that tells of the second.
        assert taken == [1] * 17 + [4] * 8


def test_skipped_optimiser_steps_move_no_statistics(four_ranks: Ranks) -> None:
    for rule in RULES:
        assert four_ranks.run(jobs.skipped, rule, timeout_s=55) == [(True, True, True)] * 4, rule
