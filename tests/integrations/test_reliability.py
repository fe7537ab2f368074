"""DDP runs survive overflow, restarts, and another number of ranks."""

from pathlib import Path

import pytest
import reliability_jobs as jobs
import torch

from gradwire.spec import compressor_classes, format_spec, parse
from processes import Ranks

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
LOSSY = [spec for spec in SPECS if parse(spec).family != "dense"]


@pytest.mark.parametrize("spec", LOSSY)
def test_an_overflow_leaves_no_trace(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.overflow_job, spec, float("inf"), "2.weight")
    expected = four_ranks.run(jobs.without_overflow_job, spec)
    for (seen, same, weights), other in zip(results, expected, strict=True):
        assert seen
        assert same
        assert torch.equal(weights, other)


@pytest.mark.parametrize("layer", ["0.weight", "4.bias"])
def test_an_overflow_in_any_bucket_leaves_no_trace(four_ranks: Ranks, layer: str) -> None:
    results = four_ranks.run(jobs.overflow_job, "topk:ratio=0.1", float("nan"), layer)
    assert all(seen and same for seen, same, _ in results)


def test_raise_is_raised_by_backward_on_all_ranks(four_ranks: Ranks) -> None:
    for text, steps in four_ranks.run(jobs.raise_job):
        assert text.startswith("NonFiniteError: a gradient of step 1 is not finite")
        assert steps == "2 steps, 1 skipped"


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "efsign", "signum"])
def test_residuals_follow_the_loss_scale(four_ranks: Ranks, spec: str) -> None:
    """Scales are powers of two, so a run with them has the same bits as one without."""
    scaled = four_ranks.run(jobs.scaled_job, spec, True)
    plain = four_ranks.run(jobs.scaled_job, spec, False)
    assert scaled[0][1] == 2.0**9
    for (weights, _), (expected, _) in zip(scaled, plain, strict=True):
        assert torch.equal(weights, expected)


def test_a_distributed_checkpoint_gives_each_rank_its_own(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    for mine, same in four_ranks.run(jobs.distributed_checkpoint_job, str(tmp_path)):
        assert mine
        assert same


def test_the_state_of_another_rank_is_refused(four_ranks: Ranks, tmp_path: Path) -> None:
    first, *others = four_ranks.run(jobs.saved_by_rank_zero_job, str(tmp_path))
    # Its own state is valid, but no rank resumes alone.
    assert first.startswith("ConfigError: ranks are set up differently:\n  buckets: ")
    assert "refused: " in first
    assert "but not rank3" in first
    for rank, text in enumerate(others, start=1):
        expected = f"has ['rank0'], but not rank{rank}; every rank saves its own"
        assert text == f"ConfigError: state: {expected}"


def test_a_link_continues_where_that_of_another_model_raises(four_ranks: Ranks) -> None:
    for found in four_ranks.run(jobs.two_models_job):
        assert found == [(5, False), (4, False)]


def test_states_of_different_steps_are_refused_on_all_ranks(four_ranks: Ranks) -> None:
    for text, same in four_ranks.run(jobs.loaded_by_some_job):
        assert "steps: 1 on rank [0, 2, 3]; 2 on rank [1]" in text
        assert same


@pytest.mark.parametrize("flip", [True, False])
def test_a_flipped_bit_is_found(four_ranks: Ranks, flip: bool) -> None:
    expected = "nothing was raised"
    if flip:
        expected = "PeerError: parameters have drifted apart:\n"
        expected += "  2.weight: rank [2] differ from the others"
    assert four_ranks.run(jobs.drift_job, flip) == [expected] * 4


@pytest.mark.parametrize("exchange", ["gather", "sharded", "leader", "hierarchical:node=2"])
def test_checksums_change_nothing_but_bytes(four_ranks: Ranks, exchange: str) -> None:
    for same, more in four_ranks.run(jobs.checksum_job, "topk:ratio=0.1", exchange):
        assert same
        assert more >= 0
    assert (
        sum(more for _, more in four_ranks.run(jobs.checksum_job, "topk:ratio=0.1", exchange)) > 0
    )


def test_a_bit_that_flips_on_the_wire_is_a_wire_error(four_ranks: Ranks) -> None:
    texts = four_ranks.run(jobs.flipped_on_the_wire_job)
    expected = "WireError: the message of rank 2 was corrupted: its CRC does not match"
    assert texts[1] == expected


@pytest.mark.parametrize("residuals", ["fold", "redistribute", "drop"])
def test_fewer_ranks_resume(four_ranks: Ranks, residuals: str) -> None:
    results = four_ranks.run(jobs.resized_job, residuals)
    before = torch.stack([r[0] for r in results])
    after = torch.stack([r[1] for r in results[:2]])
    assert torch.equal(results[0][2], results[1][2])
    if residuals == "fold":
        torch.testing.assert_close(after.sum(0), before.sum(0))
        torch.testing.assert_close(after[1], before[1] + before[3])
    elif residuals == "redistribute":
        torch.testing.assert_close(after.mean(0), before.mean(0))
    else:
        assert not after.any()
