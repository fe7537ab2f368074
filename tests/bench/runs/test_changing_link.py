"""Autopilot on emulated hosts whose links become slow and fast again."""

import pytest

from gradwire.bench.case import Change
from gradwire.bench.runs.changing_link import RateSchedule, _phases, run_changing_link
from gradwire.bench.worker.protocol import Failed, Finished, Started, Tick
from gradwire.errors import ConfigError, PeerError
from gradwire.testbed.hosts import Testbed

CASE = "topk:ratio=0.1 @ controller=autopilot"


@pytest.mark.usefixtures("emulated")
def test_a_run_on_links_that_change() -> None:
    """The choices depend on the machine; `tests/control` has links of known speeds."""
    [record] = run_changing_link("mlp-tiny", [CASE], ["1gbit", "50mbit", "1gbit"], 40)
    assert [phase.rate for phase in record.phases] == ["1gbit", "50mbit", "1gbit"]
    fast, slow, again = record.phases
    assert fast.first == 0
    assert slow.first >= 40
    assert again.first >= 80


ATTEMPTS = 3
"""Steps are timed, and what else the machine does may hide one fall of the link."""


@pytest.mark.usefixtures("emulated")
def test_auto_changes_within_ten_steps_of_a_fall() -> None:
    """Uncompressed gradients take 3 ms at 1 Gbit/s, beside the computation, and 53 ms after it."""
    assert any(_follows_a_fall() for _ in range(ATTEMPTS))


def _follows_a_fall() -> bool:
    """Returns whether the choice changed in time, to a compressed one that was kept."""
    workload = "charlm:hidden=128,batch_size=512,synthetic=true"
    [record] = run_changing_link(workload, ["auto"], ["1gbit", "50mbit"], 60, workers=2)
    _, slow = record.phases
    followed = [change for change in record.timeline if "the link was" in change.reason]
    in_time = any(slow.first < change.step <= slow.first + 10 for change in followed)
    return in_time and slow.setting not in ("none", "bf16")


def test_phases_have_the_step_of_their_first_change() -> None:
    timeline = [("none", 0), ("bf16", 4), ("none", 9), ("none", 12), ("int4", 17), ("bf16", 18)]
    changes = tuple(Change(step=step, setting=spec, reason="") for spec, step in timeline)
    end = Finished(
        case="auto",
        parameters=1,
        steps_ms=(1.0,) * 30,
        sent_bytes=1.0,
        dense_bytes=1.0,
        encode_ms=None,
        wire_ms=None,
        decode_ms=None,
        timeline=changes,
    )
    phases = _phases(end, [0, 10, 20], ["1gbit", "50mbit", "1gbit"])
    assert [phase.changed_after for phase in phases] == [4, 7, None]
    assert [phase.setting for phase in phases] == ["none", "bf16", "bf16"]


class Rates(Testbed):
    """Records the rates instead of shaping links."""

    def __init__(self) -> None:
        Testbed.__init__(self, 2, "1gbit")
        self.seen: list[str | None] = []

    def set_rate(self, rate: str | None) -> None:
        self.seen.append(rate)


def test_rates_change_at_their_steps() -> None:
    testbed = Rates()
    schedule = RateSchedule(testbed, ["1gbit", "50mbit", "2gbit"], 10)
    for _ in range(2):
        schedule.receive(Started(case=CASE))
        for step in (3, 9, 12, 15, 20, 29):
            schedule.receive(Tick(case=CASE, step=step, step_ms=1.0))
        assert schedule.first_steps == [0, 12, 20]
    assert testbed.seen == ["1gbit", "50mbit", "2gbit"] * 2
    with pytest.raises(PeerError, match="gone"):
        schedule.receive(Failed(case=CASE, error="gone"))


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="needs rates and steps"):
        run_changing_link("mlp-tiny", [CASE], [], 10)
