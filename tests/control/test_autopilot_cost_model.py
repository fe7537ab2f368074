"""Step durations learnt from timings."""

import pytest

from gradwire.control._autopilot.cost_model import TimeModel, Traffic
from gradwire.control.timing import StepTiming


def test_a_change_of_setting_separates_latency_from_bytes() -> None:
    times = TimeModel(1.5, 3)
    for _ in range(3):
        times.add(Traffic(0, 1_000_000, {2: 10}), StepTiming(1.0, 0.0, 0.6, 5e6, 0.6))
    assert times.link().byte_s == pytest.approx(0.6 / 5e6)
    for _ in range(3):
        times.add(Traffic(0, 100_000, {3: 10}), StepTiming(0.5, 0.0, 0.15, 5e5, 0.15))
    assert times.fixed_s == pytest.approx(0.1)
    assert times.link().byte_s == pytest.approx(1e-7)
    # Ranks send five bytes per byte of a message, whatever was assumed.
    assert times.sent_per_compressed_byte == pytest.approx(5)


def test_a_single_rank_learns_nothing_about_a_link() -> None:
    times = TimeModel(0.0, 0.0)
    for index in (2, 3):
        for _ in range(4):
            times.add(Traffic(0, 1000 * index, {index: 10}), StepTiming(1.0, 0.1, 0.0, 0.0, 0.0))
    assert times.fixed_s is None
    assert times.link().step_s(-0.05) == pytest.approx(1.0)


def test_codec_time_is_split_among_the_settings() -> None:
    times = TimeModel(1.5, 3)
    times.add(Traffic(0, 10, {2: 100}), StepTiming(1.0, 0.4, 0.0, 10.0, 0.4))
    times.add(Traffic(10, 5, {0: 50, 2: 50}), StepTiming(1.0, 0.1, 0.0, 10.0, 0.1))
    # Dense messages are assumed to need no encoding, so the rest has become faster.
    assert times.codec_s_per_element == pytest.approx({0: 0.0, 2: 0.002})
    assert times.codec_s(5, 1000) == pytest.approx(2.0)
    assert times.codec_s(1, 1000) == 0


def test_overlapped_communication_costs_nothing() -> None:
    times = TimeModel(1.5, 3)
    for _ in range(5):
        times.add(Traffic(0, 10, {2: 10}), StepTiming(1.0, 0.2, 0.4, 1e6, 0.0))
    link = times.link()
    assert link.step_s(-0.3) == pytest.approx(1.0)
    # Additional time is not assumed to be overlapped.
    assert link.step_s(0.4) == pytest.approx(1.4)
