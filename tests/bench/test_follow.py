"""Autopilot on emulated hosts whose links become slow and fast again."""

import pytest

from laconic.bench.follow import Changing, follow
from laconic.bench.messages import Failed, Started, Tick
from laconic.errors import ConfigError, PeerError
from laconic.network.testbed import Testbed

CASE = "topk:ratio=0.1 @ controller=autopilot"


def said(setting: str | None) -> float:
    """The share of a gradient that a setting says."""
    assert setting is not None
    return float(setting.removeprefix("topk:ratio=")) if "topk" in setting else 1.0


def test_the_setting_follows_the_link() -> None:
    reason = Testbed.reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    [record] = follow("mlp:hidden=1024", [CASE], ["1gbit", "50mbit", "1gbit"], 20)
    fast, slow, again = record.phases
    assert [phase.rate for phase in record.phases] == ["1gbit", "50mbit", "1gbit"]
    assert said(slow.setting) < said(fast.setting)
    back = [said(c.setting) for c in record.timeline if c.step > again.first]
    assert max(back, default=0) > said(slow.setting)
    assert slow.first >= 20
    # Within a dozen steps of the change, though it takes three to be sure.
    first = next(c for c in record.timeline if c.step > slow.first and said(c.setting) < 1)
    assert first.step <= slow.first + 12
    assert "the link carries" in first.reason


class Rates(Testbed):
    """Takes notes instead of shaping anything."""

    def __init__(self) -> None:
        Testbed.__init__(self, 2, "1gbit")
        self.seen: list[str | None] = []

    def set_rate(self, rate: str | None) -> None:
        self.seen.append(rate)


def test_rates_change_when_their_steps_have_come() -> None:
    testbed = Rates()
    changing = Changing(testbed, ["1gbit", "50mbit", "2gbit"], 10)
    for _ in range(2):
        changing.hear(Started(case=CASE))
        for step in (3, 9, 12, 15, 20, 29):
            changing.hear(Tick(case=CASE, step=step, step_ms=1.0))
        assert changing.begun == [0, 12, 20]
    assert testbed.seen == ["1gbit", "50mbit", "2gbit"] * 2
    with pytest.raises(PeerError, match="gone"):
        changing.hear(Failed(case=CASE, error="gone"))


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="needs rates and steps"):
        follow("mlp-tiny", [CASE], [], 10)
