"""Runs the examples of the integrations, in tiny settings, on real ranks."""

import math
from pathlib import Path

import pytest
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


def test_fsdp_with_both_legs(two_ranks: Ranks, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("A text that repeats itself can be learnt. " * 50)
    for loss, stats in two_ranks.run(
        run_example, "fsdp_gpt", "int4", "int8", 40, 1, 32, 0, str(text)
    ):
        assert loss < 0.7 * math.log(256)
        assert stats["steps"] == 40
        assert stats["ratio"] > 3


@pytest.mark.parametrize("text", [None, "book.txt"])
def test_gpt2(two_ranks: Ranks, tmp_path: Path, text: str | None) -> None:
    path = None
    if text is not None:
        path = str(tmp_path / text)
        Path(path).write_text("A text that repeats itself can be learnt. " * 50)
    sizes = (2, 32, 4, 16, 8, 128)
    args = ("gpt2", "powersgd:rank=2", 60, *sizes, 0.02, path)
    for losses, stats in two_ranks.run(run_example, *args):
        assert len(losses) == 60
        assert losses[0] == pytest.approx(math.log(128), rel=0.1)
        assert losses[-1] < 0.8 * losses[0]
        assert stats["steps"] == 60
        assert stats["ratio"] > 3


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
