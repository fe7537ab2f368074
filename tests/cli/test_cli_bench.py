from pathlib import Path

import pytest

from gradwire import cli
from gradwire.bench.records.files import append, read
from gradwire.bench.records.schema import StepRecord
from gradwire.version import VERSION
from synthetic_others import others
from synthetic_runs import train


def gradwire(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Runs the command and returns its exit code."""
    monkeypatch.setattr("sys.argv", ["gradwire", *words])
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "bench step --case top_k:ratio=0.01",
            "no compressor named 'top_k'; did you mean 'topk'?",
        ),
        (
            "bench step --cases none,torch-int8",
            "no baseline named 'torch-int8'; there are ddp-fp32, torch-fp16, torch-bf16",
        ),
        ("bench step --workload resnet9", "CIFAR-10: name its folder with --data DIR"),
        ("bench step --workload mlp --device tpu", "bench: device must be cpu or cuda, got 'tpu'"),
        ("bench train", "bench train: expected steps or epochs, got None and None"),
        ("bench train --steps 2 --seeds 0,x", "seeds: expected numbers such as 0,1,2, got '0,x'"),
        ("bench train --steps 2 --seeds 1,1", "bench train: seeds must be different numbers"),
        ("bench train --steps 2 --seeds -1", "bench: seeds must not be negative, got -1"),
        ("bench train --steps 2 --evaluate-every 0", "bench: evaluate_every must be at least 1"),
        ("bench train --steps 2 --target miou=1", "target: expected accuracy=NUMBER or loss="),
        ("bench train --steps 2 --target loss=low", "target: expected a number for loss, got 'l"),
        ("bench train --workload resnet9 --steps 2", "CIFAR-10: name its folder with --data DIR"),
        ("bench train --workload resnet9 --data . --steps 2", "CIFAR-10: no data_batch_1"),
        ("bench train --epochs 0", "bench train: epochs must be positive, got 0"),
        ("bench train --epochs 1e-9", "bench: steps must be at least 1, got 0"),
        ("bench train --epochs inf", "bench train: epochs must be finite, got inf"),
        ("bench train --epochs 1 --workers 0", "bench train: workers must be at least 1, got 0"),
        ("bench kernels --threads 0", "kernels: threads must be 1 to 1024, got 0"),
        ("bench kernels --threads -1 --levels 10,99", "kernels: threads must be 1 to 1024, got -1"),
        ("bench kernels --sizes inf", "sizes: expected whole numbers from 1 to 1e15 such as"),
        ("bench kernels --sizes 1e30", "sizes: expected whole numbers from 1 to 1e15 such as"),
        ("bench kernels --sizes 1e6,1e14", "kernels: sizes must leave room for 3 float32 tensors"),
        ("bench guards --case ddp-fp32", "guards: baselines have no guards, got 'ddp-fp32'"),
        ("bench integrations --ranks 0", "integrations: ranks must be at least 1, got 0"),
        ("methods --markdown nowhere.md", "markdown: must be a file, got nowhere.md: No such file"),
        ("methods --markdown .", "markdown: must be a file, got .: Is a directory"),
        ("bench step --steps 0", "bench: steps must be at least 1, got 0"),
        ("bench step --warmup -1", "bench: warmup must not be negative, got -1"),
        ("bench step --batch 0", "mlp: batch_size must be at least 1, got 0"),
        ("demo --steps 0", "bench: steps must be at least 1, got 0"),
        ("demo --rate fast", "rate: expected a number and bit, kbit, mbit or gbit"),
        ("report no-such-file.jsonl", "no such file of records: no-such-file.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    message: str,
) -> None:
    assert gradwire(monkeypatch, *words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gradwire: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", ["bench step", "bench train --steps 2", "bench kernels", "demo"])
def test_records_are_not_appended_to_other_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("what I meant to do\n")
    assert gradwire(monkeypatch, *words.split(), "--json", str(path)) == 2
    assert f"{path} line 1: not JSON: Expecting value" in capsys.readouterr().err
    assert path.read_text() == "what I meant to do\n"


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradwire(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{VERSION}\n"


def test_bench_step_writes_the_fields_that_others_rely_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, page = tmp_path / "runs.jsonl", tmp_path / "report.html"
    words = "bench step --workers 2 --rate none --steps 3 --warmup 1 --cases none,ddp-fp32 --json"
    assert gradwire(monkeypatch, *words.split(), str(path)) == 0
    assert "links not shaped" in capsys.readouterr().out
    dense, ours = read([path])
    assert isinstance(dense, StepRecord)
    assert isinstance(ours, StepRecord)
    assert (dense.spec, ours.spec) == ("ddp-fp32", "none")
    assert (ours.workers, ours.rate, ours.steps, ours.batch) == (2, None, 3, 32)
    assert ours.parameters == 5_824_522
    assert (ours.step_ms or 0) > 0
    assert ours.sent_bytes == dense.sent_bytes
    assert ours.command == f"gradwire {words} {path}"
    assert gradwire(monkeypatch, "report", str(path), "-o", str(page)) == 0
    assert "5.82 M parameters" in page.read_text()


def test_a_report_of_a_folder_shows_all_its_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert gradwire(monkeypatch, "report", str(tmp_path), "-o", str(page)) == 2
    assert f"(*.jsonl) in the folder {tmp_path}\n" in capsys.readouterr().err
    for record in (*others(), train("sign", 356, 32)):
        append(tmp_path / "deep" / f"{record.kind}.jsonl", record)
    assert gradwire(monkeypatch, "report", str(tmp_path), "-o", str(page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert "of kind fault" in page.read_text()
    with (tmp_path / "deep" / "fault.jsonl").open("a") as file:
        file.write('{"kind": "dance", "version": 1}\n')
    before = page.read_bytes()
    assert gradwire(monkeypatch, "report", str(tmp_path), "-o", str(page)) == 2
    assert "fault.jsonl line 3: unknown kind 'dance'" in capsys.readouterr().err
    assert page.read_bytes() == before
