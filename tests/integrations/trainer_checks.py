"""What must hold whoever trains."""

import torch
from trainer_jobs import Told


def assert_resumed(told: list[Told]) -> None:
    """Ranks agree, each has its own state back, and the interruption cannot be seen."""
    one, _ = told
    for run in told:
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
        mine, theirs = (run.saved[f"/rank{i}/lanes{key}"] for i, run in enumerate(told))
        assert mine.any()
        assert not torch.equal(mine, theirs)
