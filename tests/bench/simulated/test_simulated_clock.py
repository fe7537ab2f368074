"""The clock of local methods: a delayed transfer overlaps with the steps of its delay."""

import pytest

from gradwire.bench.cases.local import LocalCase, SyncSchedule
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.predictions.simulate import Links
from gradwire.bench.simulated.base import Snapshot
from gradwire.bench.simulated.clock import ByteCountRunClock
from gradwire.bench.workloads.base import Evaluation

COMPUTE_S = 0.01
HOPS = 6
"""Hops of a ring of four."""


def step_s(
    sync_schedule: SyncSchedule, wire_s: float, latency_s: float = 0.0, steps: int = 80
) -> float:
    """Returns the mean step if every sync is one call whose bytes take `wire_s`."""
    tellings = steps // sync_schedule.interval
    sent = round(tellings * wire_s * 1e9 / 8)
    seen = Snapshot(steps, Evaluation(1.0, "accuracy", 0.5), sent, tellings, ())
    clock = ByteCountRunClock(Links(1e9, latency_s), COMPUTE_S, 4, sync_schedule)
    [mean_ms] = clock.steps_ms(seen)
    return mean_ms / 1e3


@pytest.mark.parametrize(
    ("sync_schedule", "wire_s", "expected"),
    [
        (SyncSchedule(8), 0.04, 0.015),
        (SyncSchedule(8, 2), 0.04, 0.0125),
        (SyncSchedule(8, 4), 0.04, 0.01),
        (SyncSchedule(8, 7), 0.04, 0.01),
        (SyncSchedule(8, 7), 0.15, 0.02),
        (SyncSchedule(1), 0.02, 0.03),
        # Fragments whose transfer takes longer than the interval: the link is never idle.
        (SyncSchedule(4, 7), 0.08, 0.02),
        (SyncSchedule(4, 7), 0.04, 0.01),
    ],
)
def test_a_transfer_overlaps_with_the_steps_of_its_delay(
    sync_schedule: SyncSchedule, wire_s: float, expected: float
) -> None:
    assert step_s(sync_schedule, wire_s) == pytest.approx(expected)


def test_latencies_overlap_too() -> None:
    assert step_s(SyncSchedule(8), 0.0, latency_s=0.004) == pytest.approx(0.01 + HOPS * 0.004 / 8)
    assert step_s(SyncSchedule(8, 2), 0.0, latency_s=0.004) == pytest.approx(0.01 + 0.004 / 8)


def test_the_clock_starts_at_zero() -> None:
    seen = Snapshot(0, Evaluation(1.0, "accuracy", 0.5), 0, 0, ())
    assert (
        ByteCountRunClock(Links(1e9, 0.001), COMPUTE_S, 4, SyncSchedule(8, 7)).time_s(seen) == 0.0
    )


@pytest.mark.parametrize(
    ("text", "sync_schedule"),
    [
        ("int4 @ local=(qsparse:sync_every=8)", SyncSchedule(8)),
        ("int4 @ local=(qsparse:sync_every=8,delay=7)", SyncSchedule(8, 7)),
        ("none @ local=(local_sgd:sync_every=4,delay=1)", SyncSchedule(4, 1)),
        ("fp16 @ local=(diloco:sync_every=8,fragments=2,delay=5)", SyncSchedule(4, 5)),
        ("topk:ratio=0.1 @ local=(sparseloco:sync_every=8,delay=5)", SyncSchedule(8, 5)),
        ("topk:ratio=0.1 @ local=(cser:sync_every=8,errors=topk:ratio=0.5)", SyncSchedule(1)),
    ],
)
def test_the_sync_schedule_of_a_case(text: str, sync_schedule: SyncSchedule) -> None:
    case = parse_case(text)
    assert isinstance(case, LocalCase)
    assert case.sync_schedule() == sync_schedule
