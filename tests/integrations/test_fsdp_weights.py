"""FSDP2's all-gather of compressed weights, on two processes, and with replicas on four."""

from pathlib import Path
from typing import Any

import fsdp_weight_jobs as jobs
import pytest
import torch

import gradwire
from gradwire.integrations.weight_gather import MOST_ERROR, largest_error
from processes import Ranks

GATHERS = 2 * (2 * 2 + 1)
"""All-gathers of a step of two micro-batches: the root stays unsharded after forward."""


@pytest.mark.parametrize("with_unused", [False, True])
def test_none_is_bitwise_what_fsdp_does_by_itself(two_ranks: Ranks, with_unused: bool) -> None:
    for expected, found, stats in two_ranks.run(jobs.identity_job, with_unused, 20):
        assert found == expected
        assert stats["sent_bytes"] == stats["dense_bytes"]
        assert stats["weight_sent_bytes"] == stats["weight_dense_bytes"] > 0
        assert stats["weight_calls"] == 20 * (2 * 2 + 1)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8": ("int8", {}, {}),
    "random": ("qsgd:bits=8", {}, {}),
    "kept": ("qsgd:bits=4", {"reshard_after_forward": False}, {}),
    "bf16": ("int8", {"bf16": True}, {}),
    "checkpointing": ("qsgd:bits=8", {"checkpoints": True}, {}),
    "async": ("int8", {}, {"async": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_compute_with_the_same_weights_until_the_optimiser_steps(
    two_ranks: Ranks, case: str
) -> None:
    spec, options, settings = CASES[case]
    results = two_ranks.run(jobs.digests_job, spec, options, settings)
    for steps, stats, losses in results:
        assert steps == results[0][0]
        seen = []
        for digests in steps:
            assert len(digests) == 3
            for found in digests.values():
                assert len(set(found)) == 1
            seen.append(tuple(found[0] for found in digests.values()))
        assert len(set(seen)) == 3, "weights should change with every step"
        assert stats["steps"] == 3
        assert 0 < stats["weight_relative_error"] < (0.2 if "4" in spec else 0.02)
        assert losses == pytest.approx(results[0][2], abs=0.5)


def test_async_all_gathers_change_nothing(two_ranks: Ranks) -> None:
    sync = two_ranks.run(jobs.digests_job, "int8", {}, {})
    later = two_ranks.run(jobs.digests_job, "int8", {}, {"async": True})
    assert [(steps, losses) for steps, _, losses in sync] == [
        (steps, losses) for steps, _, losses in later
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_messages(two_ranks: Ranks, dtype: torch.dtype) -> None:
    [(sent, dense), _] = two_ranks.run(jobs.expected_bytes_job, dtype)
    options = {"reshard_after_forward": True, "bf16": dtype == torch.bfloat16}
    for _, stats, _ in two_ranks.run(jobs.digests_job, "int8", options, {}):
        # Three steps of two micro-batches, in forward and in backward.
        assert stats["weight_sent_bytes"] == stats["weight_received_bytes"] == 12 * sent
        assert stats["weight_dense_bytes"] == 12 * dense
        assert stats["weight_calls"] == 12 * 3
        assert stats["sent_bytes"] > stats["weight_sent_bytes"]
        assert stats["ratio"] == stats["dense_bytes"] / stats["sent_bytes"]


def test_eight_bits_train_as_well_as_full_precision(two_ranks: Ranks) -> None:
    plain, _ = two_ranks.run(jobs.losses_job, None, 60)[0]
    results = two_ranks.run(jobs.losses_job, "int8", 60)
    for loss, weights in results:
        assert loss == pytest.approx(plain, rel=0.02)
        assert torch.equal(weights, results[0][1])
    assert plain < 2.5


def test_resume_is_bitwise_also_with_random_rounding(two_ranks: Ranks, tmp_path: Path) -> None:
    for losses, weights, step in two_ranks.run(jobs.resume_job, str(tmp_path)):
        assert losses
        assert weights
        assert step


def test_detach_restores_the_hooks(two_ranks: Ranks) -> None:
    for restored, same, stats in two_ranks.run(jobs.detached_job):
        assert restored
        assert same
        assert stats["weights"] == "int8"
        assert stats["weight_calls"] == 0


def test_both_legs_with_replicas(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.replicas_job)
    for stats, weights, losses, expected in results:
        assert stats["steps"] == 3, "replicas exchange after the last micro-batch only"
        assert stats["weight_calls"] == 3 * 2 * (2 * 2 + 1)
        assert torch.equal(weights, results[0][1])
        assert losses == pytest.approx(expected, rel=0.02)


def test_replicas_of_fsdp_itself_decode_the_same_weights(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.native_replicas_job)
    for weights, digests, stats in results:
        assert torch.equal(weights, results[0][0])
        assert digests == results[0][1]
        assert stats["steps"] == 2


def test_a_second_copy_inside_a_node_is_the_decoded_one(four_ranks: Ranks) -> None:
    for equal, compared, sent, expected in four_ranks.run(jobs.secondary_job):
        assert equal
        assert compared == 3
        assert sent == expected


def test_refusals_name_thing_rule_and_value_of_weights(two_ranks: Ranks) -> None:
    results = two_ranks.run(jobs.refusals_job)
    assert results[0].keys() == results[1].keys()
    assert all(text.startswith("ConfigError") for found in results for text in found.values())
    found = results[0]
    below = "compresses weights below what its bound allows"
    for spec in ("topk:ratio=0.1", "signsgd", "efsign", "powersgd:rank=2", "fp16"):
        assert f"weights: {spec} {below}: nothing bounds the error" in found[spec]
    assert f"weights: qsgd:bits=3 {below}: an entry may be off by 0.33 of" in found["qsgd:bits=3"]
    assert f"weights: natural {below}: an entry may be off by 1 of" in found["natural"]
    assert "no compressor named 'int2'" in found["int2"]
    assert f"weights: topk:ratio=0.5 {below}" in found["policy"]
    assert "policy 'head*' sets a memory or an exchange" in found["policy memory"]
    assert "expected a spec string or a compressor, got 8" in found["type"]
    assert "give one of them, got 'int4' and 'int4'" in found["both"]
    assert "no method for gradients" in found["none"]
    assert "ranks are set up differently" in found["differ"]
    assert "weights.compressor.class: " in found["differ"]
    assert (
        "share ranks [0, 1]; expected rank 0 alone: replicas are a dimension of their own"
        in (found["no replicas"])
    )
    assert "through FullyShardedDataParallel (FSDP1), whose hooks cannot" in found["fsdp1"]
    assert "Callback: the model is in FullyShardedDataParallel" in found["fsdp1 trainer"]
    assert "Callback: a GradScaler under FSDP2 is not supported" in found["scaler"]
    assert "set_custom_all_gather of the unit of " in found["taken"]
    assert "is taken by Recorder" in found["taken"]
    assert "gathers torch.float32, but positions.weight as torch.bfloat16" in found["mixed"]
    assert "entries of torch.bfloat16, expected" in found["later"]
    assert "was saved without weights=, expected 'int8'" in found["load none"]
    assert "was saved with weights" in found["load some"]
    assert "weights.compressor.block is 256, expected 128" in found["load other"]


def test_a_trainer_with_several_shard_groups_is_refused(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.other_group_job):
        assert text.startswith("ConfigError: Callback: the model is sharded over 2 of 4 ranks")


def test_an_older_torch_has_no_all_gather_hook(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.old_torch_job):
        assert "FSDP2's set_custom_all_gather needs torch 99.0 or newer, got 2." in text


def test_the_usual_quantisers_are_admissible() -> None:
    for spec in ("int8", "int4", "fp8", "eightbit", "qsgd:bits=4", "qsgd:bits=8", "bf16", "none"):
        assert largest_error(gradwire.parse(spec)) <= MOST_ERROR
