"""Buckets with little to say go out together: fewer calls, and the same means."""

import pytest
import torch
from torch.futures import Future

from gradwire.integrations.bucketing import Buckets, PendingBucket
from processes import Jobs, Ranks

jobs, ddp_jobs = Jobs("bucketing_jobs"), Jobs("ddp_jobs")


def load(name: str) -> PendingBucket:
    return PendingBucket([name], [torch.zeros(1)], torch.zeros(1), Future())


def test_buckets_wait_until_there_is_enough_to_say() -> None:
    buckets = Buckets(least_bytes=100)
    assert buckets.add(load("a"), 60, False) is None
    ready = buckets.add(load("b"), 40, False)
    assert ready is not None
    assert [names for names, _ in ready.messages] == [["a", "b"]]
    assert [one.names for one in ready.loads] == [["a"], ["b"]]
    assert buckets.add(load("c"), 99, False) is None
    ready = buckets.add(load("d"), 0, True)
    assert ready is not None
    assert [names for names, _ in ready.messages] == [["c", "d"]]
    assert buckets.last() == [["a", "b"], ["c", "d"]]


def test_none_waits_where_nothing_is_asked() -> None:
    buckets = Buckets()
    assert buckets.add(load("a"), 0, False) is not None
    assert buckets.add(load("b"), 0, True) is not None
    assert buckets.last() == [["a"], ["b"]]


# Of five layers the last is too small for thin factors.
@pytest.mark.parametrize(
    ("spec", "rounds", "calls_apart"), [("topk:ratio=0.1", 1, 5), ("powersgd:rank=1", 2, 9)]
)
def test_one_message_a_round_says_what_many_do(
    four_ranks: Ranks, spec: str, rounds: int, calls_apart: int
) -> None:
    apart = four_ranks.run(jobs.calls_job, spec, 0)
    merged = four_ranks.run(jobs.calls_job, spec, 10**9)
    assert {calls for _, calls in merged} == {rounds}
    assert {calls for _, calls in apart} == {calls_apart}
    for (found, _), (expected, _) in zip(merged, apart, strict=True):
        if rounds == 1:
            assert torch.equal(found, expected)
        # Sums of floats depend on where in a message they lie.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, merged[0][0])


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1"])
def test_resumed_runs_have_the_same_bits(four_ranks: Ranks, spec: str) -> None:
    assert all(four_ranks.run(ddp_jobs.resume_job, spec, 1000))


def test_uneven_inputs_under_join(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(ddp_jobs.uneven_job, "topk:ratio=0.1", 1_000_000)
    assert all(torch.equal(first, other) for other in others)


def test_a_negative_number_is_refused(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.refused_job):
        assert text == "attach: least_bytes must be at least 0, got -1"
