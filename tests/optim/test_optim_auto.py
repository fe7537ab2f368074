"""Compressed optimisers with `compress="auto"`, and what attach advises for adaptive optimisers."""

import optim_auto_jobs as jobs
import pytest
import torch

from processes import Ranks


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_auto_settles_on_a_method_of_updates_and_resumes_bitwise(
    two_ranks: Ranks, kind: str
) -> None:
    straight, resumed, before, after, sparse = zip(
        *two_ranks.run(jobs.automatic, kind, timeout_s=55), strict=True
    )
    assert straight[0].isfinite().all()
    assert all(torch.equal(w, straight[0]) for w in (*straight, *resumed))
    assert before[0] == before[1] == after[0] == after[1]
    assert before[0]["phase"] == "settled"
    assert before[0]["settled_at"] <= 50
    # Nothing divides the mean update, so sparse methods are candidates.
    assert all(sparse)
    assert not before[0]["adaptive"]
    rows = {row["spec"]: row for row in before[0]["candidates"]}
    mine = rows[before[0]["setting"]]
    assert mine["admitted"]
    assert mine["link_bytes"] < 0.3 * rows["none"]["link_bytes"]


def test_attach_logs_the_one_line_to_use_instead(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(jobs.advised, timeout_s=55)
    lines = [lines[0].partition("use: ")[2] if lines else None for lines, _, _ in first]
    start = "optimizer = gradwire.optim."
    end = 'compress="auto:risk=low")'
    assert lines == [
        f"{start}AdamW(model, lr=0.002, betas=(0.8, 0.95), {end}",
        f"{start}Adam(model, lr=0.001, {end}",
        f"{start}AdamW(model, params=optimizer.param_groups, {end}",
        None,
        None,
        None,
    ]
    assert "sparse gradients stall AdamW" in first[0][0][0]
    assert not any(lines for lines, _, _ in second)
    for _, made, groups in first[:3]:
        assert made in ("gradwire.optim.adamw.AdamW", "gradwire.optim.adamw.Adam")
        assert groups
    [own] = first[0][2]
    assert own == {"lr": 0.002, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    assert [group["weight_decay"] for group in first[2][2]] == [0.1, 0.0] * 3
