"""Controllers on four real processes."""

import control_jobs as jobs
import torch

from processes import Ranks

CONTROLLERS = [
    "schedule:first=0.5,last=0.1,stages=3,length=6,after=1",
    "accordion:low=0.5,high=0.1,interval=1,epoch_steps=2",
    "autopilot",
    "gravac:low=4,high=64,epsilon=0.6,window=3,alpha=1",
]


def test_ranks_decide_the_same_and_stay_equal(four_ranks: Ranks) -> None:
    """With the wall clock: GraVAC's throughputs are measured, and yet equal on all ranks."""
    for controller in CONTROLLERS:
        # The first call waits until four processes have started.
        results = four_ranks.run(jobs.controlled_run, "topk:ratio=0.1", controller, 6, timeout_s=55)
        weights, explained = zip(*results, strict=True)
        assert all(torch.equal(w, weights[0]) for w in weights)
        assert weights[0].isfinite().all()
        assert all(one == explained[0] for one in explained)
        # Steps are so short that the overhead budget of Autopilot may allow a single update.
        decisions = explained[0]["decisions"]
        assert explained[0]["settings"] if controller == "autopilot" else len(decisions) > 1
    assert explained[0]["throughput"]
    assert all(value > 0 for value in explained[0]["throughput"].values())


def test_different_controllers_are_refused_at_once(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.different, 20):
        assert "controller" in text
        assert "ranks are set up differently" in text


def test_batches_grow_while_gradient_norms_are_stable(four_ranks: Ranks) -> None:
    """Gradients are dense; accumulation saves exchanges."""
    results = four_ranks.run(jobs.accumulated, 48, timeout_s=55)
    for weights, taken in results:
        assert torch.equal(weights, results[0][0])
        # Two epochs of 8 batches to compare, and the step that sends the norms of the second.
        assert taken == [1] * 17 + [4] * 8


def test_skipped_optimiser_steps_move_no_statistics(four_ranks: Ranks) -> None:
    for controller in CONTROLLERS:
        assert four_ranks.run(jobs.skipped, controller, timeout_s=55) == [(True, True, True)] * 4, (
            controller
        )
