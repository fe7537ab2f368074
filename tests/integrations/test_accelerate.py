"""Accelerate on two real processes."""

from pathlib import Path

from trainer_checks import assert_resumed

from processes import Jobs, Ranks

jobs = Jobs("accelerate_jobs")


def test_a_resumed_run_is_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    assert_resumed(two_ranks.run(jobs.resume_job, str(tmp_path)))


def test_accelerate_alone_loads_rank_0_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    """The state is refused on rank 1, and so on rank 0 too."""
    first, second = two_ranks.run(jobs.without_us_job, str(tmp_path))
    assert "but not rank1; every rank saves its own" in first
    assert second == "state: has ['rank0'], but not rank1; every rank saves its own"


def test_refusals_name_thing_rule_and_value(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(jobs.refusals_job, str(tmp_path)):
        assert "expected an Accelerator, got DistributedDataParallel" in found["accelerator"]
        assert "got ['DistributedDataParallel']" in found["handle"]
        assert "expected what gradwire.attach returns, got []" in found["nothing"]
        assert "keeps states already" in found["twice"]
        assert "ranks [0, 1] of 2 have no intact file there, only []" in found["dense"]
        assert "ranks [1] of 2 have no intact file there" in found["corrupted"]
        assert "ranks [1] of 2 have no intact file there" in found["half"]
        assert found.pop("detached") == "nothing was raised"
        assert all(text.startswith("ConfigError") for text in found.values()), found


def test_a_run_under_fsdp_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(jobs.sharded_resume_job, str(tmp_path))
    assert_resumed(results)
    for run in results:
        assert run.stats["weights"] == "qsgd:bits=8"
