"""`bench train` from the user's side: which cases run, which are skipped, and the records."""

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scripted_cluster import Script, ScriptedCluster, evaluated, finished

from gradwire import cli
from gradwire.bench.records.files import append, read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.runs import cluster_run, resume, train
from gradwire.bench.runs.train import TrainBench
from gradwire.bench.worker.protocol import Evaluated, Failed, Job, Message, Started
from gradwire.errors import ConfigError, MissingExtra

CASES = ("efsign", "ddp-fp32", "compute-only")


def bench(path: Path | None, **changes: object) -> TrainBench:
    settings: dict[str, object] = {
        "workload": "mlp-tiny",
        "cases": CASES,
        "seeds": (0, 1),
        "workers": 2,
        "rate": None,
        "steps": 4,
        "evaluate_every": 2,
        "command": "gradwire bench train",
        "json_path": path,
    }
    return TrainBench(**{**settings, **changes})  # type: ignore[arg-type]


def records_of(path: Path) -> list[TrainRecord]:
    return [record for record in read([path]) if isinstance(record, TrainRecord)]


def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def all_well(job: Job) -> Iterator[Message]:
    for case in job.case_order:
        yield Started(case=case)
        if case != "compute-only":
            yield evaluated(case, 0, 3.0)
            yield evaluated(case, 4, 1.0)
        yield finished(case, (8.0,) if case == "compute-only" else (10.0, 20.0, 30.0))


def stops_in_efsign(job: Job) -> Iterator[Message]:
    for message in all_well(job):
        yield message
        if message == Started(case="efsign"):
            raise KeyboardInterrupt


def fails_in_efsign(job: Job) -> Iterator[Message]:
    for message in all_well(job):
        yield message
        if message == Started(case="efsign"):
            yield Failed(case="efsign", error="ValueError: no")
            return


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    cluster = ScriptedCluster([], note=None)
    monkeypatch.setattr(cluster_run, "open_cluster", cluster.open)
    return cluster


def test_baselines_come_first(scripted: ScriptedCluster, tmp_path: Path) -> None:
    scripted.scripts = [all_well, all_well]
    assert bench(tmp_path / "runs.jsonl").run(console()) == "done"
    assert [(job.seed, job.case_order) for job in scripted.jobs] == [
        (seed, ("compute-only", "ddp-fp32", "efsign")) for seed in (0, 1)
    ]
    records = records_of(tmp_path / "runs.jsonl")
    assert [(r.spec, r.seed) for r in records][:3] == [(case, 0) for case in reversed(CASES)]
    assert [r.scaling_efficiency for r in records[:3]] == [1.0, 0.4, 0.4]
    assert {r.workload_spec for r in records} == {"mlp-tiny"}
    assert {(r.steps, r.batch, r.metric_better) for r in records} == {(4, 8, "higher")}


def test_an_interrupted_bench_resumes(scripted: ScriptedCluster, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    scripted.scripts = [stops_in_efsign]
    assert bench(path).run(console()) == "interrupted"
    assert [(r.spec, r.status) for r in records_of(path)][-1] == ("efsign", "interrupted")
    scripted.scripts, again = [all_well, all_well], console()
    assert bench(path).run(again) == "done"
    assert "ddp-fp32, seed 0: done already in" in printed(again)
    assert [job.case_order for job in scripted.jobs[1:]] == [
        ("efsign",),
        ("compute-only", "ddp-fp32", "efsign"),
    ]
    # The remaining cases use the compute time of the earlier call.
    efsign = next(r for r in records_of(path) if r.spec == "efsign" and r.status == "done")
    assert efsign.compute_ms == 8.0


def test_a_run_that_failed_is_tried_again_and_one_that_is_done_only_if_asked(
    scripted: ScriptedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    scripted.scripts = [fails_in_efsign]
    assert bench(path, seeds=(0,)).run(console()) == "failed"
    assert [r.status for r in records_of(path)] == ["done", "done", "failed"]
    scripted.scripts = [all_well]
    assert bench(path, seeds=(0,)).run(console()) == "done"
    assert scripted.jobs[-1].case_order == ("efsign",)
    scripted.scripts = []
    assert bench(path, seeds=(0,)).run(console()) == "done"
    assert len(scripted.jobs) == 2
    scripted.scripts = [all_well]
    assert bench(path, seeds=(0,), again=True).run(console()) == "done"
    assert len(scripted.jobs[-1].case_order) == 3


def diverges(job: Job) -> Iterator[Message]:
    for message in all_well(job):
        is_last = isinstance(message, Evaluated) and message.step == 4
        yield replace(message, loss=math.nan) if is_last else message


def test_a_diverged_run_is_not_repeated(scripted: ScriptedCluster, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    scripted.scripts = [diverges]
    assert bench(path, seeds=(0,)).run(console()) == "done"
    assert [r.status for r in records_of(path)] == ["done", "diverged", "diverged"]
    again = console()
    assert bench(path, seeds=(0,)).run(again) == "done"
    assert len(scripted.jobs) == 1
    assert "Not finished: ddp-fp32 diverged, efsign diverged" in printed(again)


@pytest.mark.parametrize(
    ("scripts", "code"),
    [([all_well], 0), ([fails_in_efsign], 1), ([stops_in_efsign], 130)],
)
def test_the_exit_code_shows_the_ending(
    scripted: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, scripts: list[Script], code: int
) -> None:
    scripted.scripts = scripts
    words = f"gradwire bench train --workload mlp-tiny --steps 4 --case {','.join(CASES)}"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert end.value.code == code


@pytest.mark.parametrize(
    "change",
    [{"steps": 6}, {"workers": 3}, {"rate": "1gbit"}, {"workload": "mlp-tiny:batch_size=4"}],
)
def test_runs_of_another_setting_do_not_count(
    scripted: ScriptedCluster, tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "runs.jsonl"
    scripted.scripts = [all_well]
    bench(path, seeds=(0,)).run(console())
    scripted.scripts = [all_well]
    bench(path, seeds=(0,), **change).run(console())
    assert [len(job.case_order) for job in scripted.jobs] == [3, 3]


def test_a_file_of_another_version_is_refused_before_anything_runs(
    scripted: ScriptedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    scripted.scripts = [all_well]
    bench(path, seeds=(0,)).run(console())
    before = path.read_text().replace('"version": 1', '"version": 2')
    path.write_text(before)
    with pytest.raises(ConfigError, match="line 1: record format version 2, this gradwire reads 1"):
        bench(path).run(console())
    assert path.read_text() == before
    assert len(scripted.jobs) == 1


def test_a_page_is_written_about_old_and_new_runs(
    scripted: ScriptedCluster, tmp_path: Path
) -> None:
    scripted.scripts = [all_well, all_well]
    path, page = tmp_path / "runs.jsonl", tmp_path / "report.html"
    bench(path, seeds=(0,)).run(console())
    bench(path, output=page, target="loss=1.5").run(console())
    text = page.read_text()
    assert all(f'data-spec="{case}"' in text for case in CASES)
    assert "Final accuracy against time" in text


def test_epochs_are_steps_of_all_workers(scripted: ScriptedCluster) -> None:
    scripted.scripts = [all_well]
    bench(None, workload="resnet9-tiny", steps=None, epochs=2, seeds=(0,)).run(console())
    assert scripted.jobs[0].steps == 2 * (512 // 16) / 2


def test_a_missing_tensorboard_is_an_error_before_anything_runs(
    scripted: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gradwire.bench.runs.progress.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'gradwire\[tensorboard\]'"):
        bench(None, tensorboard=tmp_path).run(console())
    assert scripted.jobs == []


@pytest.mark.usefixtures("emulated")
def test_bytes_on_emulated_hosts_are_those_that_the_interfaces_counted(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    cases = ("compute-only", "ddp-fp32", "efsign @ exchange=sharded")
    changes = {"workload": "mlp:hidden=256", "rate": "1gbit", "cases": cases, "seeds": (0,)}
    assert bench(path, **changes, steps=6).run(console()) == "done"
    alone, dense, ours = records_of(path)
    assert all((r.status, r.shaped, r.rate) == ("done", True, "1gbit") for r in (dense, ours))
    for record in (dense, ours):
        assert record.sent_bytes is not None
        assert record.interface_bytes is not None
        assert record.sent_bytes <= record.interface_bytes <= 1.1 * record.sent_bytes
    # Barriers, and the rendezvous of the ranks.
    assert (alone.interface_bytes or 0) < 0.01 * (dense.interface_bytes or 0)


def test_the_default_cases_contain_both_baselines() -> None:
    assert train.baselines_first(reversed(train.CASES))[:2] == train.CASES[:2]


def test_records_of_other_kinds_and_times_are_no_earlier_runs(tmp_path: Path) -> None:
    from synthetic_runs import steps, training_runs

    path = tmp_path / "runs.jsonl"
    for record in [*training_runs(), *steps()]:
        append(path, record)
    setting = resume.Setting("mlp on synthetic digits", "mlp", 4, "100mbit", True, 240, "cpu")
    assert resume.finished_runs(path, setting) == []
