"""Lightning on two real processes."""

from pathlib import Path

import pytest
import torch
from trainer_checks import assert_resumed

from processes import Jobs, Ranks

jobs = Jobs("lightning_jobs")


@pytest.mark.parametrize("kind", ["callback", "strategy"])
def test_a_resumed_run_is_the_same(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert_resumed(two_ranks.run(jobs.resume_job, str(tmp_path), kind))


@pytest.mark.parametrize("kind", ["callback", "strategy"])
def test_a_checkpoint_saved_after_fit_can_be_resumed(
    two_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    folders = ["gradwire", "gradwire/epoch=1.ckpt", "gradwire/over.ckpt"]
    for same, left in two_ranks.run(jobs.after_fit_job, str(tmp_path), kind):
        assert same
        assert left == (folders if kind == "strategy" else [])


def test_gradients_are_compressed_on_cpu(two_ranks: Ranks, tmp_path: Path) -> None:
    for steps, compressed, dense in two_ranks.run(jobs.counted_job, str(tmp_path)):
        assert steps == 4
        assert not torch.equal(compressed, dense)


@pytest.mark.parametrize("kind", ["callback", "strategy"])
def test_controllers_receive_the_ends_of_epochs(
    two_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for whole, resumed in two_ranks.run(jobs.epochs_job, str(tmp_path), kind):
        assert whole == [0.25, 0.125]
        assert resumed == [0.125]


def test_residuals_follow_the_loss_scale(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(jobs.scaler_job, str(tmp_path)) == [1024, 1024]


@pytest.mark.parametrize("weights", [None, "qsgd:bits=8"])
def test_a_model_under_fsdp_resumes(two_ranks: Ranks, tmp_path: Path, weights: str | None) -> None:
    results = two_ranks.run(jobs.sharded_resume_job, str(tmp_path), weights)
    assert_resumed(results)
    for run in results:
        assert run.stats.get("weights") == weights


def test_fabric_resumes_from_a_distributed_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(jobs.fabric_job, str(tmp_path))
    assert_resumed([result for result, _ in results])
    # Fabric's own checkpoint has what rank 0 gave it, and no rank loads that silently.
    for _, text in results:
        assert text.startswith("ConfigError: ")
    assert "every rank saves its own" in results[1][1]


def test_a_model_under_fsdp_may_attach_by_itself(two_ranks: Ranks, tmp_path: Path) -> None:
    for steps, found in two_ranks.run(jobs.sharded_job, str(tmp_path)):
        assert steps == 4
        assert "dense.ckpt was saved without Gradwire; missing_ok=True" in found["dense"]
        assert "signsgd does not go with a reduce-scatter" in found["votes"]
        assert "options ['optimizer'] are for DDP, not for FSDP2" in found["option"]
        assert "weights= is for models under FSDP2; DDP sends no weights" in found["weights"]
        assert all(text.startswith("ConfigError") for text in found.values()), found


def test_refusals_name_thing_rule_and_value(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(jobs.refusals_job, str(tmp_path))[0]
    assert "no compressor named 'top_k'; did you mean 'topk'?" in found["spec"]
    assert "unknown options ['memroy'], expected some of ['memory'," in found["option"]
    assert "no controller named 'gravak'; did you mean 'gravac'?" in found["controller"]
    assert "a ddp_comm_hook would need the same slot" in found["two hooks"]
    assert "the model's only hook slot has a ddp_comm_hook" in found["hook"]
    assert "this model has a link already" in found["both"]
    assert "wrap its model in DistributedDataParallel, got Classifier" in found["single"]
    assert "dense.ckpt was saved without Gradwire; missing_ok=True" in found["dense"]
    assert "ranks [0, 1] of 2 have no intact file there" in found["dense files"]
    for allowed in ("allowed", "allowed files"):
        assert found.pop(allowed) == "nothing was raised"
    assert all(text.startswith("ConfigError") for text in found.values()), found
