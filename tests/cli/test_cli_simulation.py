"""`gradwire simulate` and `gradwire advise` as users call them."""

from pathlib import Path

import pytest

from gradwire import cli
from gradwire.bench.predictions.forecast_records import read_predictions
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord


def gradwire(monkeypatch: pytest.MonkeyPatch, words: str) -> object:
    monkeypatch.setattr("sys.argv", ["gradwire", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.run()
    return end.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("advise --workload mlp", "advise: give the links' --rate such as 1gbit, or let"),
        ("advise --rate 1gbit", "advise: give either --model module:function or --workload"),
        ("advise --rate 1gbit --model x --workload mlp", "advise: give either --model"),
        ("advise --rate 1gbit --model nowhere:f", "advise: give --optimizer such as sgd or adamw"),
        ("advise --rate 1gbit --workload mlp --optimizer sgd", "advise: give --optimizer such as"),
        (
            "advise --rate 1gbit --model nowhere:f --optimizer adamw",
            "model: cannot import 'nowhere'",
        ),
        (
            "advise --rate 1gbit --model nowhere:f --optimizer best",
            "no optimizer named 'best' in torch.optim",
        ),
        ("simulate --workers 1e12 --workload mlp-tiny", "simulate: workers must be 1 to 1000000"),
        ("advise --rate fast --workload mlp", "rate: expected a number and bit"),
        ("advise --rate 1gbit --workload mlp-tiny --workers 1", "advise: workers must be 2 to"),
        ("simulate --latency 5", "latency: expected a number and s, ms or us"),
        ("simulate --workers 0", "workers: expected whole numbers from 1 to 1e15 such as"),
        ("simulate --workers 1.5", "workers: expected whole numbers from 1 to 1e15 such as"),
        ("simulate --case torch-powersgd:rank=1", "torch-powersgd:rank=1: torch's own hooks"),
        (
            "simulate --case efsign,topk:ratio=0.1@controller=autopilot",
            "topk:ratio=0.1@controller=autopilot: a controller decides during training",
        ),
        ("simulate --workload mlp-tiny --steps 0", "simulate: steps must be at least 1, got 0"),
        ("simulate --device tpu", "bench: device must be cpu or cuda, got 'tpu'"),
        ("advise --rate 1gbit --workload mlp --device gpu", "bench: device must be cpu or cuda"),
        ("bench validate --workers four", "workers: expected whole numbers from 1 to"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    if words.startswith("simulate --case"):
        words += " --workload mlp-tiny"
    assert gradwire(monkeypatch, words) == 2
    _, err = capsys.readouterr()
    assert err.startswith(f"gradwire: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "simulate --workload mlp-tiny",
        "simulate --workload mlp-tiny --steps 2",
        "advise --workload mlp-tiny --rate 1gbit",
    ],
)
def test_the_record_file_is_checked_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
) -> None:
    def measured(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured in vain")

    monkeypatch.setattr("gradwire.bench.predictions.measured_model.measure_model", measured)
    assert gradwire(monkeypatch, f"{words} --json {tmp_path}") == 2
    assert f"cannot write records to {tmp_path}: not a regular" in capsys.readouterr().err


def test_a_thousand_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "f.jsonl"
    words = "simulate --workload mlp-tiny --workers 2,1024 --case ddp-fp32,efsign --rate 100mbit"
    assert gradwire(monkeypatch, f"{words} --latency 1ms --json {path}") == 0
    assert "Sent per step and worker" in capsys.readouterr().out
    found = {(r.spec, r.workers): r for r in read_predictions(path)}
    assert found.keys() == {(s, n) for s in ("ddp-fp32", "efsign") for n in (2, 1024)}
    dense = found["ddp-fp32", 1024]
    assert dense.sent_bytes == pytest.approx(2 * 1023 / 1024 * 4 * dense.parameters, rel=1e-3)
    # 2046 hops of a millisecond, and the bytes.
    assert dense.wire_ms == pytest.approx(2046 + 8 * dense.sent_bytes / 1e5, rel=1e-3)


def test_controllers_change_settings_in_simulated_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    cases = ("topk:ratio=0.1", "topk:ratio=0.1@controller=(schedule:first=1,last=0.1,after=10)")
    words = f"simulate --workload mlp-tiny --workers 2 --rate 10mbit --steps 20 --json {path}"
    assert gradwire(monkeypatch, f"{words} --case {','.join(cases)}") == 0
    alone, led = [record for record in read([path]) if isinstance(record, TrainRecord)]
    assert alone.timeline == ()
    assert [(c.step, c.setting) for c in led.timeline] == [(0, "none"), (10, "topk:ratio=0.1")]
    assert led.timeline[1].reason == "10 steps have passed"
    # Ten dense steps, then ten equal to those of the other run.
    assert alone.sent_bytes is not None
    assert alone.dense_bytes is not None
    assert led.sent_bytes == pytest.approx((alone.sent_bytes + alone.dense_bytes) / 2, rel=0.01)
    assert led.points[-1].time_s > 2 * alone.points[-1].time_s


def test_advice_ends_with_a_recommendation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "advise --workload mlp-tiny --workers 4 --rate 1mbit --case powersgd:rank=1,efsign"
    assert gradwire(monkeypatch, f"{words} --json {tmp_path / 'a.jsonl'}") == 0
    out = capsys.readouterr().out
    assert "4 workers, links of 1mbit, 0.1 ms" in out
    assert "Use " in out.splitlines()[-1]
    records = read_predictions(tmp_path / "a.jsonl")
    assert len(records) == 4
    [advised] = [record.spec for record in records if record.advised]
    assert f"Use {advised}:" in out.splitlines()[-1]
    assert {record.risk for record in records if record.spec == "none"} == {"none"}
    assert all(0 <= (record.relative_error or 0) <= 1 for record in records)
