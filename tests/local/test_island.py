"""Two islands of two ranks, whose models are sharded inside them, and synchronised between them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import island_jobs as jobs
import pytest
import torch
from torch import Tensor

from gradwire.engine.plan import Plan
from gradwire.spec import parse
from processes import Ranks

STEPS = 20
"""A multiple of `sync_every`, so that the last step ends with a sync."""


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def shard_bytes(parts: Mapping[str, Tensor], spec: str) -> int:
    """Returns the bytes of one rank's message about its trained parameters."""
    compressor, total = parse(spec), 0
    for name, part in parts.items():
        if name.startswith("frozen"):
            continue
        is_compressed = part.dim() > 1 and part.numel() >= Plan.min_numel
        total += compressor.nbytes(part.shape) if is_compressed else part.nbytes
    return total


@pytest.mark.parametrize(
    ("name", "spec", "flag"),
    [
        ("diloco-none", "none", 4),
        ("local", "none", 0),
        ("qsparse", "topk:ratio=0.1 | qsgd:bits=4", 4),
        ("sparseloco", "chunktopk:k=8,chunk=64 | codebook", 4),
    ],
)
def test_a_rank_sends_its_shard_and_places_stay_equal(
    four_ranks: Ranks, name: str, spec: str, flag: int
) -> None:
    results = four_ranks.run(jobs.trained, "fsdp", name, STEPS)
    parts = [one[0] for one in results]
    assert same(parts[0], parts[2])
    assert same(parts[1], parts[3])
    assert not same(parts[0], parts[1])
    assert parts[1]["narrow.weight"].numel() == 0
    for own, stats, _ in results:
        assert stats["syncs"] == 5
        assert stats["steps"] == STEPS
        dense_bytes = shard_bytes(own, "none")
        assert stats["message_bytes"] == 5 * (shard_bytes(own, spec) + flag)
        # With two islands a mean sends a message once, and so does a gather.
        assert stats["sent_bytes"] == stats["message_bytes"]
        assert stats["dense_bytes"] == STEPS * dense_bytes
    whole = sum(shard_bytes(own, "none") for own in parts[:2])
    plain = four_ranks.run(jobs.trained, "plain", name, 0)[0][0]
    assert whole == shard_bytes(plain, "none")


@pytest.mark.parametrize("name", ["diloco-none", "diloco-delayed", "streaming"])
def test_islands_are_as_workers_of_whole_models(four_ranks: Ranks, name: str) -> None:
    sharded, plain = (four_ranks.run(jobs.trained, kind, name, STEPS) for kind in ("fsdp", "plain"))
    for (_, _, one), (_, _, two) in zip(sharded, plain, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-5, atol=1e-6)


# Workers of the other method have nothing in common but the blocks of the last step.
@pytest.mark.parametrize("name", sorted(jobs.METHODS.keys() - {"cser-blocks"}))
def test_every_method_agrees_between_islands(four_ranks: Ranks, name: str) -> None:
    results = four_ranks.run(jobs.common_parts, name, STEPS)
    for start, end in results:
        assert not torch.equal(start["first.weight"], end["first.weight"])
    for place in (0, 1):
        assert same(results[place][1], results[place + 2][1])


@pytest.mark.parametrize("name", ["sparseloco", "cser", "streaming", "powersgd"])
def test_resume_through_a_distributed_checkpoint(
    four_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    for equal in four_ranks.run(jobs.cut_short, str(tmp_path), name, ("fsdp", "fsdp"), 5):
        assert all(equal)


@pytest.mark.parametrize("kinds", [("fsdp", "hsdp"), ("hsdp", "fsdp")])
def test_resume_onto_another_layout(
    four_ranks: Ranks, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """A dense mean has the same value in any layout; residuals have one for every entry."""
    whole, own = tmp_path / "whole", tmp_path / "own"
    for equal in four_ranks.run(jobs.cut_short, str(whole), "diloco-delayed", kinds, 5):
        assert all(equal)
    for count, equal in four_ranks.run(jobs.resharded, str(own), "sparseloco", kinds):
        # Anchors of 8 trained parameters, and residuals of the 3 that are compressed.
        assert count >= 11
        assert equal


def test_tensor_parallelism_inside(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.trained_tensor_parallel, 8)
    for place in (0, 1):
        assert same(results[place][0], results[place + 2][0])
    assert not same(results[0][0], results[1][0])
    for _, whole, plain in results:
        for key in whole:
            torch.testing.assert_close(whole[key], plain[key], rtol=1e-5, atol=1e-6)


def test_evaluation_of_the_mean_leaves_no_trace(four_ranks: Ranks) -> None:
    """FSDP2 keeps its outermost unit unsharded after a forward pass alone."""
    with_it, without = (four_ranks.run(jobs.evaluated, flag) for flag in (True, False))
    for (one, loss), (two, _) in zip(with_it, without, strict=True):
        assert same(one, two)
        assert loss == with_it[0][1] > 0


@pytest.mark.parametrize("name", ["sparseloco", "cser"])
def test_a_shard_that_is_not_finite(four_ranks: Ranks, name: str) -> None:
    """All ranks raise, those with finite shards too: else they would wait for the others."""
    for text, is_unchanged in four_ranks.run(jobs.nonfinite_shard, name):
        assert "not finite on some rank" in text
        assert is_unchanged


def test_what_makes_no_islands(four_ranks: Ranks) -> None:
    expected: dict[str, Any] = {
        "two dimensions": "process_group: expected a mesh of one dimension, got 2 ('islands', 'in",
        "over all": "LocalSGD: first.weight is sharded over ranks [0, 1] (Shard(dim=0) on mesh dim",
        "hsdp over islands": "LocalSGD: first.weight has its gradients averaged over ranks [0, 2]",
        "simulated": "LocalSGD: first.weight is a DTensor, whose ranks are real ones; give proces",
        "crossed": "ranks are set up differently:\n",
        "other layouts": "ranks are set up differently:\n  layout first.bias: ",
        "one rank": "ranks are set up differently:\n  seed: 1 on rank [0]; 0 on rank [1]",
        "small shards": "policy 'weight': topk:ratio=0.1 would compress none of its 1 parameters",
    }
    for rank, found in enumerate(four_ranks.run(jobs.refusals)):
        for name, text in found.items():
            start = expected[name]
            if name == "over all" and rank >= 2:
                start = start.replace("[0, 1]", "[2, 3]")
            if name == "hsdp over islands" and rank % 2:
                start = start.replace("[0, 2]", "[1, 3]")
            assert text.startswith(start), (rank, name, text)
        assert "place in the island" in found["crossed"]
