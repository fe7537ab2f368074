"""Hugging Face's Trainer on two real processes."""

from pathlib import Path

import pytest
from trainer_checks import assert_resumed

from processes import Jobs, Ranks

jobs = Jobs("transformers_jobs")


def test_a_resumed_run_is_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    assert_resumed(two_ranks.run(jobs.resume_job, str(tmp_path)))


def test_controllers_receive_the_ends_of_epochs(two_ranks: Ranks, tmp_path: Path) -> None:
    """An epoch is four steps, and the rate falls from 0.01 to 0 in ten."""
    for whole, resumed in two_ranks.run(jobs.epochs_job, str(tmp_path)):
        assert whole == pytest.approx([0.006, 0.002])
        assert resumed == pytest.approx([0.002])


def test_a_trainer_that_trains_again(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(jobs.again_job, str(tmp_path)) == [[2, 2], [2, 2]]


def test_refusals_name_thing_rule_and_value(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(jobs.refusals_job, str(tmp_path)):
        assert "expected a Trainer, got Classifier" in found["trainer"]
        assert "ratio" in found["spec"]
        assert "unknown options ['sed']" in found["option"]
        assert "wrap its model in DistributedDataParallel, got Classifier" in found["single"]
        assert "ranks [0, 1] of 2 have no intact file there" in found["dense"]
        assert "saved with other parameters than the model has now" in found["another run"]
        assert "ranks [0, 1] of 2 have no intact file there" in found["elsewhere"]
        for allowed in ("given", "allowed"):
            assert found.pop(allowed) == "nothing was raised"
        assert all(text.startswith("ConfigError") for text in found.values()), found


def test_a_run_under_fsdp_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(jobs.sharded_resume_job, str(tmp_path))
    assert_resumed(results)
    for run in results:
        assert run.stats["weights"] == "qsgd:bits=8"
