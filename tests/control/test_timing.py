"""What ranks tell each other of their laps."""

import pytest

from gradwire.control.timing import StepTiming, heard_of, told_by


def test_who_waits_least_knows_the_link() -> None:
    laps = [StepTiming(1.0, 0.1, wire_s, 1e6, wire_s + 0.1) for wire_s in (0.5, 0.2, 0.3, 0.6)]
    told = [told_by(lap, rank, 4) for rank, lap in enumerate(laps)]
    mean = [sum(column) / 4 for column in zip(*told, strict=True)]
    heard = heard_of(mean, 4)
    # On average ranks waited 0.2 s more for others, which no setting changes.
    assert heard == pytest.approx(StepTiming(1.0, 0.1, 0.2, 1e6, 0.3))
    many = [told_by(StepTiming(1.0, 0.0, 2.0, 1.0, 2.0), rank, 100) for rank in range(100)]
    assert len(many[0]) == len(StepTiming._fields) + 16
    mean = [sum(column) / 100 for column in zip(*many, strict=True)]
    assert heard_of(mean, 100) == pytest.approx(StepTiming(1.0, 0.0, 2.0, 1.0, 2.0))
