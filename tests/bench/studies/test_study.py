"""Studies: every one is well formed, resumes, and stops at its time limit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from gradwire import cli
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.predictions import measured_model
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.studies.definitions import STUDIES, find_studies
from gradwire.bench.studies.study import Study, distinct_cases
from gradwire.bench.workloads.base import parse_workload
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import ExchangeCost, measure_exchange

RATES = ("10gbit", "1gbit", "100mbit")
QTOPK = "topk:ratio=0.01 | qsgd:bits=4 @ local=(qsparse:sync_every=8)"


def run(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    monkeypatch.setattr("sys.argv", ["gradwire", "study", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert isinstance(end.value.code, int)
    return end.value.code


def records(path: Path) -> list[TrainRecord]:
    return [record for record in read([path]) if isinstance(record, TrainRecord)]


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_is_well_formed(name: str) -> None:
    study = STUDIES[name]
    parse_workload(study.workload)
    assert len(set(study.cases)) == len(study.cases) > 1
    for case in study.cases:
        parse_case(case)


def test_a_name_may_stand_for_several_studies() -> None:
    assert list(find_studies("gravac")) == ["gravac"]
    assert list(find_studies("grace")) == [key for key in STUDIES if key.startswith("grace-")]
    assert {"gravac", "gravac-vgg16"} < find_studies("gravac*").keys()
    with pytest.raises(ConfigError, match="no study named 'gracious'; there are "):
        find_studies("gracious")


def test_shorter_runs_are_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = replace(
        STUDIES["exchanges"], workload="mlp-tiny", steps=4, shorter=(0.5,), target="loss=9"
    )
    monkeypatch.setitem(cast(dict[str, Study], STUDIES), "exchanges", study)
    path, page = tmp_path / "study.jsonl", tmp_path / "page.html"
    words = f"exchanges --seeds 0 --case none --json {path} --page {page}"
    assert run(monkeypatch, words) == 0
    assert [(r.steps, r.rate) for r in records(path)] == [(n, r) for n in (4, 2) for r in RATES]
    assert "at the best length of run" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_a_study_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.jsonl"
    setting = f"exchanges --workload mlp-tiny --steps 4 --json {path} --seeds"
    some = "--case none --case topk:ratio=0.1"
    assert run(monkeypatch, f"{setting} 0 {some}") == 0
    first = path.read_text()
    # All rates of both cases come from one run each.
    assert [(r.spec, r.rate) for r in records(path)] == [
        (case, rate) for case in ("none", "topk:ratio=0.1") for rate in RATES
    ]
    assert run(monkeypatch, f"{setting} 0,1 {some}") == 0
    assert path.read_text().startswith(first)
    assert [r.seed for r in records(path)] == [0] * 6 + [1] * 6
    capsys.readouterr()
    assert run(monkeypatch, f"{setting} 0,1 {some}") == 0
    # Only the tables are printed again, over both seeds.
    assert path.read_text().count("\n") == 12
    out = capsys.readouterr().out
    assert "seed 0" not in out
    assert "Quality at the end of the schedule" in out


def test_records_hold_the_time_on_each_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "study.jsonl"
    words = ["gradwire", "study", "exchanges", "--workload", "mlp-tiny", "--steps", "8"]
    words += ["--seeds", "0", "--json", str(path), "--case", QTOPK, "--case", "none"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        cli.run()
    fast, _, slow, dense, *_ = records(path)
    assert fast.simulated
    assert fast.spec == slow.spec == QTOPK
    assert len(fast.losses) == 8
    assert fast.points[-1].metric == slow.points[-1].metric
    assert 0 < fast.points[-1].time_s < slow.points[-1].time_s
    assert fast.compute_ms is not None
    assert (fast.ratio or 0) > 8 * 10
    assert dense.ratio == pytest.approx(1, rel=0.01)


def test_parallel_runs_equal_sequential_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "exchanges --workload mlp-tiny --steps 4 --seeds 0 --case topk:ratio=0.1"
    assert run(monkeypatch, f"{words} --json {tmp_path / 'one'}") == 0
    # A run that fails does not stop the other.
    words += " --case torch-powersgd:rank=1"
    assert run(monkeypatch, f"{words} --json {tmp_path / 'two'} --jobs 2") != 0
    assert "torch-powersgd:rank=1, seed 0: ConfigError" in capsys.readouterr().out
    sequential, parallel = (
        {(r.spec, r.rate): (r.losses, r.sent_bytes) for r in records(tmp_path / name)}
        for name in ("one", "two")
    )
    assert sequential == parallel
    assert len(sequential) == len(RATES)


def test_a_study_stops_at_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.jsonl"
    setting = f"cser --workload mlp-tiny --steps 4 --json {path} --minutes 1e-9"
    assert run(monkeypatch, setting) == 130
    assert "runs remain" in capsys.readouterr().out
    assert not path.read_text()


def test_a_run_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.jsonl"
    words = f"exchanges --workload mlp-tiny --steps 2 --seeds 0 --json {path}"
    # Torch's own hook needs processes, so this run fails when it starts.
    assert run(monkeypatch, f"{words} --case torch-powersgd:rank=1 --case none") == 1
    assert "torch-powersgd:rank=1, seed 0: ConfigError" in capsys.readouterr().out
    assert {r.spec for r in records(path)} == {"none"}


def test_a_controller_runs_once_for_every_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "study.jsonl"
    ramp = "topk:ratio=0.1@controller=(schedule:first=1,last=0.1,after=2)"
    words = f"exchanges --workload mlp-tiny --steps 6 --seeds 0 --json {path} --case {ramp}"
    assert run(monkeypatch, words) == 0
    fast, _, slow = records(path)
    assert (fast.rate, slow.rate) == ("10gbit", "100mbit")
    assert fast.timeline
    times = [b.time_s - a.time_s for a, b in pairwise(slow.points)]
    # Dense at first, so that early steps take longer than later ones.
    assert times[0] > times[-1] > 0


def test_an_exchange_is_measured_once_for_all_rates_and_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met: list[Plan] = []

    def noted(
        plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
    ) -> ExchangeCost:
        met.append(plan)
        return measure_exchange(plan, tensors, steps, size)

    monkeypatch.setattr(measured_model, "measure_exchange", noted)
    ramp = "topk:ratio=0.1@controller=(schedule:first=1,last=0.1,after=2)"
    words = f"exchanges --workload mlp-tiny --steps 4 --seeds 0,1 --json {tmp_path / 's.jsonl'}"
    assert run(monkeypatch, f"{words} --case none --case efsign --case {ramp}") == 0
    assert len(records(tmp_path / "s.jsonl")) == 3 * 2 * len(RATES)
    assert len(met) >= 3
    assert len(met) == len(set(met))


def test_studies_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*STUDIES]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nonsense --json x", "no study named 'nonsense'; there are grace-resnet20"),
        ("cifar10", "--json"),
        ("cifar10 --json x --minutes 0", "minutes must be positive"),
        ("cifar10 --json x --jobs 0", "jobs must be at least 1"),
        ("cifar10 --json x --smoke", "--smoke keeps no records"),
    ],
)
def test_mistakes_are_named(
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, words) == 2
    assert message in capsys.readouterr().err


def test_a_smoke_run_takes_every_case_and_keeps_no_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "qsparse --smoke") == 0
    out = capsys.readouterr().out
    for case in STUDIES["qsparse"].cases:
        assert f"{case}, seed 0: accuracy" in out
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_smoke_form_of_every_study_is_well_formed(name: str) -> None:
    study = STUDIES[name].smoke()
    assert parse_workload(study.workload).synthetic
    whole = STUDIES[name]
    assert study.cases == whole.cases[:: whole.smoke_every]


def test_a_smoke_run_of_several_studies_takes_every_case_once() -> None:
    first, second, third = (
        replace(STUDIES["qsparse"].smoke(), cases=cases)
        for cases in (("a", "b"), ("b", "c"), ("a",))
    )
    left = [study.cases for study in distinct_cases([first, second, third])]
    assert left == [("a", "b"), ("c",), ("a",)]


def test_a_study_takes_every_learning_rate_of_its_grid() -> None:
    study = STUDIES["cser-cifar100"]
    forms = study.by_learning_rate()
    rates = [parse_workload(form.workload).learning_rate_at(0.2) for form in forms]
    assert rates == pytest.approx(study.learning_rates)
    assert study.smoke().by_learning_rate() == (study.smoke(),)
    one = study.with_changes("mlp-tiny", 4, None, None).by_learning_rate()
    assert [form.workload for form in one] == ["mlp-tiny"]
