"""Runs the examples of the integrations, in tiny settings, on real ranks."""

from pathlib import Path

from example_jobs import run_example, run_example_as_torchrun

from processes import Ranks


def test_ddp(two_ranks: Ranks) -> None:
    for accuracy, stats in two_ranks.run(run_example, "ddp", "topk:ratio=0.05", 60, 64):
        assert accuracy > 0.8
        assert stats["steps"] == 60
        assert stats["ratio"] > 15


def test_fsdp(two_ranks: Ranks) -> None:
    for accuracy, stats in two_ranks.run(run_example, "fsdp", "topk:ratio=0.05", 60, 64):
        assert accuracy > 0.8
        assert stats["steps"] == 60
        assert stats["ratio"] > 15


def test_lightning_fit(two_ranks: Ranks) -> None:
    args = ("lightning_fit", "topk:ratio=0.05", 3, 64, 2)
    for accuracy, stats in two_ranks.run(run_example_as_torchrun, *args):
        assert accuracy > 0.8
        assert stats["steps"] == 48
        assert stats["ratio"] > 15


def test_accelerate_loop_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    args = ("accelerate_loop", "topk:ratio=0.05", 1, 16, str(tmp_path))
    first = two_ranks.run(run_example_as_torchrun, *args)
    second = two_ranks.run(run_example_as_torchrun, *args)
    for (before, _), (after, stats) in zip(first, second, strict=True):
        assert after > before > 0.5
        assert stats["steps"] == 32
        assert stats["ratio"] > 15


def test_trainer(two_ranks: Ranks, tmp_path: Path) -> None:
    args = ("trainer", "topk:ratio=0.05", 40, 64, str(tmp_path))
    for accuracy, stats in two_ranks.run(run_example_as_torchrun, *args):
        assert accuracy > 0.8
        assert stats["steps"] == 40
        assert stats["ratio"] > 15
    assert len([*(tmp_path / "checkpoint-20" / "gradwire").iterdir()]) == 2
