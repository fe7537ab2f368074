"""The automatic mode on real processes: measured times differ, the decisions do not."""

import auto_jobs as jobs
import pytest
import torch

from gradwire.auto.link_probe import check_backend
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Settings
from processes import Ranks


@pytest.mark.parametrize(
    ("size", "spec", "adaptive", "chunk_bytes"),
    [(2, "auto", False, 40_000), (4, "auto:risk=low", True, None)],
)
def test_ranks_settle_on_the_same_and_stay_equal(
    request: pytest.FixtureRequest, size: int, spec: str, adaptive: bool, chunk_bytes: int | None
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
    results = ranks.run(jobs.automatic_run, spec, adaptive, chunk_bytes, timeout_s=55)
    weights, before, after = zip(*results, strict=True)
    assert weights[0].isfinite().all()
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert all(one == before[0] for one in before)
    assert all(one == before[0] for one in after)
    # A review may have begun since.
    assert before[0]["phase"] in ("settled", "review")
    assert before[0]["settled_at"] <= 50
    mine = next(r for r in before[0]["candidates"] if r["spec"] == before[0]["setting"])
    assert mine["admitted"]
    levels = ("none", "low") if "low" in spec else ("none", "low", "medium")
    assert mine["risk"] in levels


def test_mixed_plans_keep_ranks_equal_and_resume_bitwise(two_ranks: Ranks) -> None:
    results = two_ranks.run(jobs.mixed_run, timeout_s=55)
    for straight, resumed, *specs in results:
        assert specs == ['"0.weight": powersgd:rank=2; default: int4'] * 2
        assert torch.equal(straight, resumed)
        assert torch.equal(straight, results[0][0])


def test_what_auto_chooses_itself_cannot_be_given(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(jobs.refusals, timeout_s=55):
        for text, part in zip(
            texts,
            (
                "leave controller out, got 'autopilot'",
                "leave memory out, got 'residual'",
                "leave exchange out, got 'gather'",
                "auto: risk must be one of ['low', 'medium'], got 'high'",
                "speed",
                "optimizer must be a torch.optim.Optimizer, got 'adam'",
                "optimizer is used by auto only",
                "auto: needs at least two ranks",
                "switch: auto chooses the method",
            ),
            strict=True,
        ):
            assert part in text


def test_different_budgets_are_refused_at_once(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.different):
        assert "ranks are set up differently" in text


def test_groups_that_cannot_be_probed_and_other_integrations_refuse_by_name() -> None:
    with pytest.raises(ConfigError, match="backend 'mpi' cannot be probed"):
        check_backend("mpi")
    with pytest.raises(ConfigError, match="attach_fsdp: auto is not supported here"):
        Settings("auto").refuse_auto("attach_fsdp")
