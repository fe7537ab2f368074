"""Step timings averaged over ranks."""

import pytest

from gradwire.control.timing import StepTiming, decode_timing, encode_timing


def test_the_wire_time_is_that_of_the_rank_that_waits_least() -> None:
    timings = [StepTiming(1.0, 0.1, wire_s, 1e6, wire_s + 0.1) for wire_s in (0.5, 0.2, 0.3, 0.6)]
    sent = [encode_timing(timing, rank, 4) for rank, timing in enumerate(timings)]
    mean = [sum(column) / 4 for column in zip(*sent, strict=True)]
    received = decode_timing(mean, 4)
    # On average ranks waited 0.2 s longer for others, which does not depend on the setting.
    assert received == pytest.approx(StepTiming(1.0, 0.1, 0.2, 1e6, 0.3))
    many = [encode_timing(StepTiming(1.0, 0.0, 2.0, 1.0, 2.0), rank, 100) for rank in range(100)]
    assert len(many[0]) == len(StepTiming._fields) + 16
    mean = [sum(column) / 100 for column in zip(*many, strict=True)]
    assert decode_timing(mean, 100) == pytest.approx(StepTiming(1.0, 0.0, 2.0, 1.0, 2.0))
