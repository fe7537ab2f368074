"""Predictions against measured steps: the summary, the records in the repository, a small run."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from gradwire.bench.predictions import validation
from gradwire.bench.predictions.forecast_records import Setting, read_forecasts
from gradwire.bench.predictions.validation import (
    CHOICE,
    LIMIT,
    Validation,
    choices,
    is_quiet,
    summary,
)
from gradwire.bench.records.files import append
from gradwire.bench.records.schema import ForecastRecord
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError, PeerError
from gradwire.perfmodel.overlap import Forecast
from gradwire.perfmodel.predict import Prediction
from gradwire.testbed.cluster import LoopbackCluster

RESULTS = Path(__file__).parents[3] / "results"
COMMITTED = RESULTS / "validation.jsonl"
KNOWN = (
    "32 of 36 are: where processors are the bottleneck, top-k's decoding takes a fifth longer than "
    "rehearsed, so that it is chosen there, and two workers wait longer for powersgd's four calls"
)

TITLE = parse_workload("mlp").title


def record(step_ms: float, measured_ms: float, others: float = 0.0) -> ForecastRecord:
    prediction = Prediction(Forecast(step_ms / 1e3, 0.0, 0.0, 0.0, 0.0), 5.0, 2)
    made = Setting("mlp", 7, "1gbit", None, "cpu", "gradwire", {}).record(
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


@pytest.mark.parametrize(
    ("cores", "others", "quiet"),
    [("2", 0.2, True), ("2", 0.3, False), ("4", 0.3, False), ("10", 3.0, True), ("10", 3.1, False)],
)
def test_four_workers_may_have_others_on_half_of_the_cores_to_spare(
    cores: str, others: float, quiet: bool
) -> None:
    assert is_quiet(replace(record(1, 1, others), machine={"cores": cores})) is quiet


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    append(tmp_path / "f.jsonl", record(90, 100))
    assert read_forecasts(tmp_path / "f.jsonl") == [record(90, 100)]


def test_a_file_of_another_version_is_refused_and_half_a_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    append(path, record(90, 100))
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert read_forecasts(path) == [record(90, 100)]
    path.write_text(whole.replace('"version": 1', '"version": 0'))
    with pytest.raises(ConfigError, match="line 1: record format version 0, this gradwire reads 1"):
        read_forecasts(path)
    assert path.read_text().count("\n") == 1


@dataclass(frozen=True)
class NoPort(LoopbackCluster):
    """Workers who find that somebody else has their port."""

    launches: ClassVar[int] = 0

    def launch(self, command: Sequence[str], **hear: object) -> int:  # type: ignore[override]
        NoPort.launches += 1
        tell = hear["on_error_line"]
        assert callable(tell)
        tell(0, "DistNetworkError: code: -98, name: EADDRINUSE")
        return 1


def test_a_port_in_use_costs_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "open_cluster", lambda n, rate: nullcontext(NoPort(n)))
    with pytest.raises(PeerError, match=r"ended with code 1: rank 0: .*EADDRINUSE"):
        Validation(("none",), (None,), (2,), 2, None, "c").run(Console(quiet=True))
    assert NoPort.launches == 3


def test_a_small_run_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    monkeypatch.setattr(validation, "_ROUNDS", 1)
    run = Validation(
        ("powersgd:rank=1",), (None,), (2,), 2, path, "c", workload="mlp-tiny", commit="c0ffee"
    )
    run.run(Console(quiet=True))
    [found] = read_forecasts(path)
    assert (found.spec, found.workers, found.rate) == ("powersgd:rank=1", 2, None)
    assert (found.measured_ms or 0) > 0
    assert found.step_ms > 0
    assert found.calls == 2
    assert found.machine["commit"] == "c0ffee"


def test_what_is_measured_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But what was measured beside other programs is."""
    path, asked = tmp_path / "v.jsonl", []

    def cells(
        self: Validation, cases: Sequence[str], workers: int, rate: str | None
    ) -> list[ForecastRecord]:
        asked.append((tuple(cases), workers))
        loud = {4: 1.0}.get(workers, 0.0)
        made = replace(record(90, 100, loud), workers=workers, rate=rate, workload=TITLE)
        return [replace(made, spec=case) for case in cases]

    monkeypatch.setattr(Validation, "_cells", cells)
    for cases in (("none",), ("none", "efsign"), ("none", "efsign")):
        Validation(cases, ("1gbit",), (2, 4), 2, path, "c").run(Console(quiet=True))
    both = ("none", "efsign")
    assert asked == [(("none",), 2), (("none",), 4), (("efsign",), 2), (both, 4), (both, 4)]
    assert len(read_forecasts(path)) == 7


def test_a_choice_is_judged_by_what_was_measured() -> None:
    """Where the fastest is hardly faster than dense, dense is chosen."""
    rows = [record(90, 100), replace(record(100, 80), spec="topk"), record(200, 60)]
    rows[2] = replace(rows[2], spec="none")
    assert choices(rows) == {(4, "1gbit"): pytest.approx(100 / 60 - 1)}
    assert "the choice is 67% above the fastest" in summary(rows)
    rows[2] = replace(rows[2], step_ms=94)
    assert choices(rows) == {(4, "1gbit"): 0}


@pytest.mark.skipif(not COMMITTED.exists(), reason="no validation records in the repository")
class TestCommitted:
    @pytest.mark.xfail(reason=KNOWN)
    def test_predictions_are_near_what_was_measured(self) -> None:
        far = [
            (r.spec, r.workers, r.rate, r.off) for r in self.records() if abs(r.off or 0) > LIMIT
        ]
        assert not far

    @pytest.mark.xfail(reason=KNOWN)
    def test_the_choice_is_among_the_best(self) -> None:
        """What is chosen from predictions is within 10 % of what was fastest."""
        found = choices(self.records())
        assert len(found) >= 9
        assert max(found.values()) <= CHOICE

    def test_with_a_core_for_each_worker_all_are_near(self) -> None:
        rows = read_forecasts(RESULTS / "validation-16-cores.jsonl")
        assert len(rows) >= 24
        assert all(is_quiet(r) for r in rows)
        assert not [(r.spec, r.workers, r.rate, r.off) for r in rows if abs(r.off or 0) > LIMIT]
        assert max(choices(rows).values()) <= CHOICE

    def records(self) -> list[ForecastRecord]:
        # Cells that were measured again come later.
        last = {(r.spec, r.workers, r.rate): r for r in read_forecasts(COMMITTED)}
        found = [*last.values()]
        assert len(found) >= 36
        assert all(r.measured_ms for r in found)
        return found
