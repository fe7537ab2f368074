"""The risk labels of `advise` rank methods as recorded runs do."""

from pathlib import Path

import pytest

from gradwire.bench.predictions.risk_calibration import correlations, rank_correlation, rate
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord

STUDIES = Path(__file__).parents[3] / "results" / "studies"


def test_labels_follow_the_records() -> None:
    paths = [STUDIES / f"{name}.jsonl" for name in ("cifar10", "ptb", "gpt-adamw")]
    rated = rate(record for record in read(paths) if isinstance(record, TrainRecord))
    found = correlations(rated)
    assert found["sgd"] > 0.7
    assert found["adaptive"] > 0.8
    # Signs lose 0.9 points on CIFAR-10 and nothing on PTB, but much with Adam.
    levels = {(row.adaptive, row.level) for row in rated if row.spec == "efsign"}
    assert levels == {(False, "low"), (True, "high")}


def test_rank_correlation_shares_ranks_among_equals() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.8944, abs=1e-4)
    assert rank_correlation([1, 1], [1, 2]) == 0
