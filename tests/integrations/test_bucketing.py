"""Small buckets are sent together: fewer collectives, and the same means."""

import pytest
import torch
from torch.futures import Future

from gradwire.integrations.bucketing import Buckets, PendingBucket
from processes import Jobs, Ranks

jobs, ddp_jobs = Jobs("bucketing_jobs"), Jobs("ddp_jobs")


def bucket(name: str) -> PendingBucket:
    return PendingBucket([name], [torch.zeros(1)], torch.zeros(1), Future())


def test_buckets_wait_until_there_is_enough_to_send() -> None:
    buckets = Buckets(least_bytes=100)
    assert buckets.add(bucket("a"), 60, False) is None
    ready = buckets.add(bucket("b"), 40, False)
    assert ready is not None
    assert [names for names, _ in ready.messages] == [["a", "b"]]
    assert [one.names for one in ready.buckets] == [["a"], ["b"]]
    assert buckets.add(bucket("c"), 99, False) is None
    ready = buckets.add(bucket("d"), 0, True)
    assert ready is not None
    assert [names for names, _ in ready.messages] == [["c", "d"]]
    assert buckets.last() == [["a", "b"], ["c", "d"]]


def test_no_bucket_waits_without_a_minimum() -> None:
    buckets = Buckets()
    assert buckets.add(bucket("a"), 0, False) is not None
    assert buckets.add(bucket("b"), 0, True) is not None
    assert buckets.last() == [["a"], ["b"]]


# Of five layers the last is too small for low-rank factors.
@pytest.mark.parametrize(
    ("spec", "rounds", "calls_apart"), [("topk:ratio=0.1", 1, 5), ("powersgd:rank=1", 2, 9)]
)
def test_one_message_per_round_gives_the_means_of_many(
    four_ranks: Ranks, spec: str, rounds: int, calls_apart: int
) -> None:
    apart = four_ranks.run(jobs.calls_job, spec, 0)
    merged = four_ranks.run(jobs.calls_job, spec, 10**9)
    assert {calls for _, calls in merged} == {rounds}
    assert {calls for _, calls in apart} == {calls_apart}
    for (found, _), (expected, _) in zip(merged, apart, strict=True):
        if rounds == 1:
            assert torch.equal(found, expected)
        # Floating-point sums depend on an entry's position in the message.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, merged[0][0])


@pytest.mark.parametrize(("spec", "calls"), [("topk:ratio=0.1", 5), ("powersgd:rank=1", 2)])
def test_short_messages_of_several_rounds_are_merged_by_default(
    four_ranks: Ranks, spec: str, calls: int
) -> None:
    assert {found for _, found in four_ranks.run(jobs.calls_job, spec, None)} == {calls}


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1"])
def test_resumed_runs_have_the_same_bits(four_ranks: Ranks, spec: str) -> None:
    assert all(four_ranks.run(ddp_jobs.resume_job, spec, 1000))


def test_uneven_inputs_under_join(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(ddp_jobs.uneven_job, "topk:ratio=0.1", 1_000_000)
    assert all(torch.equal(first, other) for other in others)


def test_a_negative_number_is_refused(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.refused_job):
        assert text == "settings: least_bytes must be at least 0, got -1"
