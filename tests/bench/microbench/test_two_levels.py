"""Two levels of a sparsifier select the same entries as selecting twice."""

from pathlib import Path

import pytest
import torch

from gradwire import cli
from gradwire.bench.microbench.two_level import in_two_levels, twice
from gradwire.bench.records.files import read_kinds
from gradwire.bench.records.schema import LevelsRecord
from gradwire.control.two_level import sparsifier_of
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

FACTORS = 10.0, 100.0


def run(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    monkeypatch.setattr("sys.argv", ["gradwire", "bench", "kernels", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_two_levels_select_what_one_level_selects() -> None:
    x, residual = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    ctx, base = EncodeContext((5000,)), sparsifier_of(parse("topk:ratio=0.1"))
    found = in_two_levels(base, FACTORS, EFInput(x, residual, torch.empty(5000), 0.5), ctx)
    first, second = twice(base, FACTORS, EFInput(x, residual, torch.empty(5000), 0.5), ctx)
    assert first.numel() == 500
    assert torch.equal(found, second)
    total = torch.sort((x + 0.5 * residual).abs(), descending=True).values
    torch.testing.assert_close(second.abs().sort(descending=True).values, total[:50])


def test_records_hold_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "levels.jsonl"
    words = f"--levels 10,100 --sizes 1e4,2e4 --specs topk:ratio=0.1,dgc:ratio=0.1 --json {path}"
    assert run(monkeypatch, words) == 0
    assert "twice / two levels" in capsys.readouterr().out
    records = read_kinds(path, {"levels": LevelsRecord})
    assert [(r.spec, r.numel) for r in records] == [
        ("topk", 10000),
        ("dgc", 10000),
        ("topk", 20000),
        ("dgc", 20000),
    ]
    for record in records:
        assert record.factors == FACTORS
        assert record.ratio == pytest.approx(record.twice_us / record.two_levels_us)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--levels 100,10", "levels: factors must be 1 < low < high, got 100,10"),
        ("--levels 10", "levels: expected two factors such as 10,1000, got '10'"),
        ("--levels 10,x", "levels: expected two factors such as 10,1000, got '10,x'"),
        ("--levels 10,100 --specs efsign", "levels: efsign has no factor"),
        ("--levels 10,100 --device tpu", "device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_wrong_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert run(monkeypatch, words) == 2
    assert message in capsys.readouterr().err
