"""Dense gradients that go straight to their mean: the same bits, bytes and guards as before."""

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
def test_whatever_ddp_is_asked_for(two_ranks: Ranks, option: str) -> None:
    plain = two_ranks.run(ddp_jobs.plain, 4)
    ours = two_ranks.run(ddp_jobs.trained, "none", 4, {"bucket_cap_mb": 0.01, option: True}, {})
    assert all(torch.equal(weights, plain[0]) for weights in ours)


def test_so_do_three(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(jobs.three_of_four_job))


def test_a_loop_gets_the_plain_mean(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(jobs.loop_job))


def test_gradients_of_any_strides(two_ranks: Ranks) -> None:
    assert two_ranks.run(jobs.strides_job) == [(True, True)] * 2


@pytest.mark.parametrize("mount", ["ddp", "loop", "fsdp"])
def test_all_is_counted_as_in_a_conversation(two_ranks: Ranks, mount: str) -> None:
    straight = two_ranks.run(jobs.counts_job, mount, False)
    talked = two_ranks.run(jobs.counts_job, mount, True)
    assert straight == talked
    for counts, timed in straight:
        assert counts[0] == 3
        assert all(counts)
        assert timed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_everywhere(two_ranks: Ranks, bad: float) -> None:
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


def test_drift_is_seen(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.drift_job):
        assert text.startswith("PeerError: parameters have drifted apart:")
        assert "0.weight" in text


def test_a_rank_that_does_not_come_is_told_of(two_ranks: Ranks) -> None:
    texts = two_ranks.run(jobs.absent_job)[0]
    assert len(texts) == 2
    for text in texts:
        assert re.match(r"PeerError: mean among 2 ranks failed on rank 0 after [1-9]", text), text
