"""Checks that hold for every trainer."""

import torch
from trainer_jobs import ResumeResult


def assert_resumed(results: list[ResumeResult]) -> None:
    """Checks that ranks agree, states are restored, and a resumed run equals a whole one."""
    one, _ = results
    for run in results:
        assert torch.equal(run.whole, one.whole)
        assert torch.equal(run.resumed, one.whole)
        assert run.whole.isfinite().all()
        assert run.restored.keys() == run.saved.keys()
        assert all(torch.equal(run.restored[key], value) for key, value in run.saved.items())
        ratio = run.stats["ratio"]
        assert isinstance(ratio, float)
        assert ratio > 3
    residuals = [key.partition("/lanes")[2] for key in one.saved if key.endswith("/residual")]
    assert residuals
    for key in residuals:
        mine, theirs = (run.saved[f"/rank{i}/lanes{key}"] for i, run in enumerate(results))
        assert mine.any()
        assert not torch.equal(mine, theirs)
