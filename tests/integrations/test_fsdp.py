"""FSDP2's hooks on four real processes: shards of four, and two replicas of two shards."""

import fsdp_jobs as jobs
import pytest
import torch

import gradwire
from gradwire.integrations.fsdp_private import check_version, scale_of
from processes import Ranks

SPECS = ["topk:ratio=0.1", "efsign", "qsgd:bits=4", "powersgd:rank=2"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_compressed_reduce_scatter_trains(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.scattered_job, spec)
    for weights, losses, ratio, name in results:
        assert torch.equal(weights, results[0][0])
        assert losses[-1] < losses[0]
        assert ratio > 3
        assert gradwire.parse(name) == gradwire.parse(spec)


def test_none_is_what_fsdp_does_by_itself(four_ranks: Ranks) -> None:
    for found in four_ranks.run(jobs.dense_job):
        assert all(found.values()), found
        assert len(found) == 5


# The factor of shards, which is the only one that gloo supports.
@pytest.mark.parametrize("factor", [None, 2.0])
def test_a_mean_over_replicas(four_ranks: Ranks, factor: float | None) -> None:
    for _, same, weights in four_ranks.run(jobs.replicas_job, "none", factor):
        assert same
        assert weights.isfinite().all()


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_replicas_stay_equal(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.replicas_job, spec, None)
    assert not results[0][1], "compression should be seen"
    for _, _, weights in results:
        assert torch.equal(weights, results[0][2])


SETTERS = {
    "all-reduce": ("set_requires_all_reduce",),
    "last": ("set_requires_all_reduce", "set_is_last_backward"),
    "sync": ("set_requires_gradient_sync",),
}
UNITS = 3


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1"])
@pytest.mark.parametrize("setters", SETTERS)
def test_replicas_exchange_once_after_several_micro_batches(
    four_ranks: Ranks, spec: str, setters: str
) -> None:
    results = four_ranks.run(jobs.accumulated_replicas_job, spec, SETTERS[setters])
    for exchanges, calls, error in results:
        assert exchanges == 2
        assert calls == 2 * UNITS
        assert error < 1e-7


def test_partial_sums_of_micro_batches_are_not_lost(four_ranks: Ranks) -> None:
    for text, attached, hooked, same in four_ranks.run(jobs.partial_sums_job):
        assert text.startswith("ConfigError: detach: 3 units hold sums of micro-batches that")
        assert attached
        assert same
        assert hooked.startswith("ConfigError: 4.bias: its hook after gradient accumulation would")


def test_resume_is_bitwise(four_ranks: Ranks) -> None:
    assert all(same and kept for same, kept in four_ranks.run(jobs.resume_job, "topk:ratio=0.1"))


def test_an_overflow_is_seen_in_every_shard(four_ranks: Ranks) -> None:
    for seen, text, same in four_ranks.run(jobs.overflow_job):
        assert all(seen)
        assert len(seen) >= 5
        assert text.startswith("NonFiniteError: a gradient of step 0 is not finite")
        assert same


def test_refusals_name_thing_rule_and_value(four_ranks: Ranks) -> None:
    found = four_ranks.run(jobs.refusals_job)[0]
    assert "no part of the model went through fully_shard" in found["plain"]
    assert "expected a module, got NoneType" in found["none"]
    assert "seed must be a whole number, got 'a'" in found["seed"]
    assert "is taken by _ReduceScatterHook" in found["twice"]
    assert "signsgd does not go with a reduce-scatter" in found["votes"]
    assert "leave it at 'auto', got 'gather'" in found["exchange"]
    assert "memory 'ef21' does not go with a reduce-scatter" in found["memory"]
    assert "is sharded; use gradwire.attach_fsdp" in found["reducer"]
    assert "give it the shard mesh only" in found["native"]
    assert "share ranks [0, 1]; expected rank 0 alone" in found["overlap"]
    assert "set_all_reduce_hook of the unit of 0.weight is taken by print" in found["slot"]
    assert "some of its parameters have no gradient" in found["unused"]
    assert all(text.startswith("ConfigError") for text in found.values()), found


def test_an_older_torch_is_refused_with_the_needed_version() -> None:
    check_version("set_all_reduce_hook", "2.7.1")
    with pytest.raises(gradwire.ConfigError, match=r"needs torch 2\.9 or newer, got 2\.8\.0"):
        check_version("set_custom_reduce_scatter", "2.8.0")


def test_every_operation_of_fsdp_is_a_scaled_mean() -> None:
    ops = torch.distributed.ReduceOp
    assert scale_of(ops.AVG, 4) == 1
    assert scale_of(ops.SUM, 4) == 4
    assert scale_of(ops.PREMUL_SUM(1 / 8), 4) == 0.5
    with pytest.raises(gradwire.ConfigError, match="is no mean"):
        scale_of(ops.MAX, 4)
