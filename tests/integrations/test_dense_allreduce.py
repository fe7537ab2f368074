"""Dense gradients are averaged directly: the same bits, bytes and guards as by programs."""

import math
import re

import ddp_jobs
import dense_allreduce_jobs as jobs
import pytest
import torch

from processes import Ranks


def test_two_ranks_do_what_plain_ddp_does(two_ranks: Ranks) -> None:
    plain = two_ranks.run(ddp_jobs.plain, 4)
    ours = two_ranks.run(ddp_jobs.trained, "none", 4, {"bucket_cap_mb": 0.01}, {})
    assert all(torch.equal(weights, plain[0]) for weights in ours)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view"])
def test_options_of_ddp(two_ranks: Ranks, option: str) -> None:
    plain = two_ranks.run(ddp_jobs.plain, 4)
    ours = two_ranks.run(ddp_jobs.trained, "none", 4, {"bucket_cap_mb": 0.01, option: True}, {})
    assert all(torch.equal(weights, plain[0]) for weights in ours)


def test_three_ranks_do_what_plain_ddp_does(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(jobs.three_of_four_job))


def test_a_loop_gets_the_plain_mean(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(jobs.loop_job))


def test_gradients_of_any_strides(two_ranks: Ranks) -> None:
    assert two_ranks.run(jobs.strides_job) == [(True, True)] * 2


@pytest.mark.parametrize("integration", ["ddp", "loop", "fsdp"])
def test_the_dense_path_counts_what_programs_count(two_ranks: Ranks, integration: str) -> None:
    dense = two_ranks.run(jobs.counts_job, integration, False)
    by_programs = two_ranks.run(jobs.counts_job, integration, True)
    assert dense == by_programs
    for counts, timed in dense:
        assert counts[0] == 3
        assert all(counts)
        assert timed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_seen_on_all_ranks(two_ranks: Ranks, bad: float) -> None:
    results = two_ranks.run(jobs.not_finite_job, bad)
    for grads, same, steps in results:
        assert not any(g.isfinite().all() for g in grads.values())
        assert same
        assert steps == 1


def test_switch_to_a_method_and_back(two_ranks: Ranks) -> None:
    results = two_ranks.run(jobs.switched_job)
    for weights, seen, plain_at_last in results:
        assert torch.equal(weights, results[0][0])
        assert seen == [(2, "none", False), (4, "topk:ratio=0.1", True), (6, "none", False)]
        assert plain_at_last


def test_resume_is_bitwise(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(ddp_jobs.resume_job, "none"))


def test_drift_is_detected(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.drift_job):
        assert text.startswith("PeerError: parameters have drifted apart:")
        assert "0.weight" in text


def test_an_absent_rank_raises_a_peer_error(two_ranks: Ranks) -> None:
    texts = two_ranks.run(jobs.absent_job)[0]
    assert len(texts) == 2
    for text in texts:
        assert re.match(r"PeerError: mean among 2 ranks failed on rank 0 after [1-9]", text), text
