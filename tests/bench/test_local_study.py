"""The study of local methods on tiny workloads: every case runs, and bytes are counted."""

import json
import sys
from pathlib import Path

import pytest

from laconic.bench import local_study
from laconic.bench.local_study import CASES, Row, bytes_to, study
from laconic.bench.workload import parse_workload


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_case_runs(case: str) -> None:
    workload = parse_workload("mlp-tiny")
    rows = list(study(workload, CASES[case], workers=2, steps=3, every=2, seed=0))
    assert [row.step for row in rows] == [2, 3]
    assert all(row.loss > 0 for row in rows)
    assert rows[-1].dense_bytes == 3 * rows[0].dense_bytes // 2 > 0


def test_local_steps_of_one_are_dense_ones() -> None:
    workload = parse_workload("mlp-tiny")
    one = local_study.qsparse_case("none", 1)
    setting = {"workers": 2, "steps": 6, "every": 3, "seed": 1}
    ours = list(study(workload, one, **setting))
    dense = list(study(workload, None, **setting))
    for a, b in zip(ours, dense, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_bytes_to_a_target() -> None:
    workload = parse_workload("mlp-tiny")
    rows = [Row(i, 1.0, 1.0, accuracy, 100 * i, 0, 0) for i, accuracy in [(1, 0.2), (2, 0.5)]]
    assert bytes_to(rows, workload, 0.4) == 200
    assert bytes_to(rows, workload, 0.6) is None


def test_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    words = f"x mlp-tiny qtopk dense --workers 2 --steps 2 --every 1 --json {file}"
    monkeypatch.setattr(sys, "argv", words.split())
    local_study.main()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["case"], line["step"]) for line in lines] == [
        ("qtopk", 1),
        ("qtopk", 2),
        ("dense", 1),
        ("dense", 2),
    ]
