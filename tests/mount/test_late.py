"""Means that come a step late: what is left by a pass, and that nobody waits for it."""

from typing import Any

import ddp_jobs
import late_jobs as jobs
import pytest
import torch
from torch import Tensor, nn

import laconic
from processes import Ranks

LATE = {"delay": 1}
STEPS = 6


def simulated(spec: str, steps: int) -> Tensor:
    """Four workers in this process who take each step with the last one's mean."""
    model = ddp_jobs.mlp()
    workers = laconic.simulate(model, spec, workers=4)
    named = dict(model.named_parameters())
    late = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in range(steps):
        found = []
        for rank in range(4):
            x, y = ddp_jobs.data(step, rank)
            loss = nn.functional.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(named.values()))
            found.append(dict(zip(named, gradients, strict=True)))
        with torch.no_grad():
            for name, mean in late.items():
                named[name] -= 0.1 * mean
        late = workers.step(found)
    return ddp_jobs.weights(model)


@pytest.mark.parametrize(
    "ddp",
    [
        {},
        {"bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.01, "static_graph": True},
    ],
)
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "none", "powersgd:rank=1", "efsign"])
def test_a_step_is_taken_with_the_mean_of_the_last(
    four_ranks: Ranks, spec: str, ddp: dict[str, Any]
) -> None:
    found = four_ranks.run(ddp_jobs.trained, spec, STEPS, ddp, LATE)
    assert all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(found[0], simulated(spec, STEPS))


def test_nobody_waits_for_what_has_a_step_to_arrive(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(jobs.meanwhile_job))


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1"])
def test_resumed_runs_have_the_same_bits(four_ranks: Ranks, spec: str) -> None:
    assert all(four_ranks.run(ddp_jobs.resume_job, spec, LATE))


def test_uneven_inputs_under_join(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(ddp_jobs.uneven_job, "topk:ratio=0.1", LATE)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_shows_a_step_later(four_ranks: Ranks, bad: float) -> None:
    results = four_ranks.run(jobs.overflow_job, bad)
    assert all(finite == [True, True, True, False, True] for finite, _ in results)
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)


def test_raise_is_raised_by_the_next_pass(four_ranks: Ranks) -> None:
    for text, steps in four_ranks.run(jobs.raise_job):
        assert text.startswith("NonFiniteError")
        assert steps == 3


def test_means_under_way_follow_the_loss_scale(four_ranks: Ranks) -> None:
    scaled = four_ranks.run(jobs.scaled_job, [4.0, 4.0, 8.0, 2.0, 2.0])
    plain = four_ranks.run(jobs.scaled_job, [1.0] * 5)
    torch.testing.assert_close(scaled[0], plain[0])


def test_what_is_asked_between_steps_changes_nothing(four_ranks: Ranks) -> None:
    for asked, left_alone in four_ranks.run(jobs.between_steps_job):
        assert torch.equal(asked, left_alone)


def test_refusals(four_ranks: Ranks) -> None:
    for into_late, into_early, two, apart in four_ranks.run(jobs.refused_job):
        same = "go on in the same way"
        assert into_late == f"ConfigError: state: was saved with no delay; {same}"
        assert into_early == f"ConfigError: state: was saved with delay=1; {same}"
        assert two == "ConfigError: attach: delay must be 0 to 1, got 2"
        assert apart.startswith("ConfigError: ranks are set up differently")
        assert "delay" in apart
