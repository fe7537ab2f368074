"""Predictions against measured steps: the summary, the records in the repository, a small run."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from laconic.bench import validation
from laconic.bench.forecast_records import ForecastRecord, Setting, read_forecasts
from laconic.bench.records import append
from laconic.bench.validation import LIMIT, Validation, summary
from laconic.forecast.forecast import Prediction
from laconic.forecast.timeline import Forecast

COMMITTED = Path(__file__).parents[2] / "results" / "validation.jsonl"


def record(step_ms: float, measured_ms: float, others: float = 0.0) -> ForecastRecord:
    prediction = Prediction(Forecast(step_ms / 1e3, 0.0, 0.0, 0.0, 0.0), 5.0, 2)
    made = Setting("mlp", 7, "1gbit", None, "cpu", "laconic", {}).record(
        "efsign", "gather", 4, prediction
    )
    return replace(made, measured_ms=measured_ms, others_cores=others)


def test_a_prediction_is_off_by_a_share_of_what_was_measured() -> None:
    assert record(90, 100).off == pytest.approx(-0.1)
    assert replace(record(90, 100), measured_ms=None).off is None


def test_the_summary_counts_what_is_near_and_says_when_it_was_loud() -> None:
    quiet = [record(90, 100), record(130, 100)]
    assert summary(quiet) == "1 of 2 predictions are within 15% of what was measured."
    assert "In 1 cells other programs used more" in summary([*quiet, record(1, 1, others=1.0)])


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    append(tmp_path / "f.jsonl", record(90, 100))
    assert read_forecasts(tmp_path / "f.jsonl") == [record(90, 100)]


def test_a_small_run_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    monkeypatch.setattr(validation, "_ROUNDS", 1)
    run = Validation(("powersgd:rank=1",), (None,), (2,), 2, path, "c", workload="mlp-tiny")
    run.run(Console(quiet=True))
    [found] = read_forecasts(path)
    assert (found.spec, found.workers, found.rate) == ("powersgd:rank=1", 2, None)
    assert (found.measured_ms or 0) > 0
    assert found.step_ms > 0
    assert found.calls == 2


@pytest.mark.skipif(not COMMITTED.exists(), reason="no validation records in the repository")
class TestCommitted:
    def test_predictions_are_near_what_was_measured(self) -> None:
        far = [
            (r.spec, r.workers, r.rate, r.off) for r in self.records() if abs(r.off or 0) > LIMIT
        ]
        assert not far

    def test_the_choice_is_among_the_best(self) -> None:
        """What is predicted to be fastest is within 10 % of what was fastest."""
        settings: dict[tuple[int, str | None], list[ForecastRecord]] = defaultdict(list)
        for found in self.records():
            settings[found.workers, found.rate].append(found)
        for rows in settings.values():
            choice = min(rows, key=lambda r: r.step_ms)
            best_ms = min(r.measured_ms or 0 for r in rows)
            assert (choice.measured_ms or 0) <= 1.1 * best_ms

    def records(self) -> list[ForecastRecord]:
        found = read_forecasts(COMMITTED)
        assert len(found) >= 36
        assert all(r.measured_ms for r in found)
        return found
