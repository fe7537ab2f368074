"""Autopilot on emulated hosts whose links become slow and fast again."""

import pytest

from gradwire.bench.runs.changing_link import RateSchedule, run_changing_link
from gradwire.bench.worker.protocol import Failed, Started, Tick
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
