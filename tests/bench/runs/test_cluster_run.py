import io
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scripted_cluster import Script, ScriptedCluster, evaluated, finished

from gradwire import kernels
from gradwire.bench.records.compare import Target, parse_target, time_to_target
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import Point, StepRecord, TrainRecord
from gradwire.bench.runs import cluster_run
from gradwire.bench.runs.cluster_run import ClusterRun, Provenance, Results
from gradwire.bench.runs.step import StepCollector
from gradwire.bench.runs.train_records import TrainCollector
from gradwire.bench.worker.protocol import Failed, Job, Message, Started, Tick
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError, PeerError
from gradwire.testbed.cluster import LoopbackCluster

TRAIN = Job(
    workload="charlm:hidden=64,batch_size=16",
    case_order=("compute-only", "ddp-fp32", "torch-bf16", "topk:ratio=0.1"),
    steps=4,
    warmup=1,
    evaluate_every=2,
)
STEP = Job(
    workload="mlp:hidden=64,batch_size=4",
    case_order=("ddp-fp32", "torch-powersgd:rank=1", "no-such-method", "none") * 2,
    steps=3,
    warmup=3,
)
HIDDEN_64_PARAMETERS = 784 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10


def text_console() -> Console:
    return Console(file=io.StringIO(), width=100)


@contextmanager
def loopback(workers: int, rate: str | None) -> Iterator[LoopbackCluster]:
    yield LoopbackCluster(workers)


def trained(job: Job, path: Path | None, console: Console) -> Results:
    workload = parse_workload(job.workload)
    target = Target("loss", 2.0, "lower")
    collect = partial(TrainCollector, job=job, workload=workload, target=target)
    return ClusterRun(job, 2, "100mbit", "gradwire demo", path).run(collect, console)


def stepped(job: Job, console: Console) -> Results:
    collect = partial(StepCollector, batch=4, parameters=HIDDEN_64_PARAMETERS, rounds=2)
    return ClusterRun(job, 2, "100mbit", "gradwire bench step", None).run(collect, console)


def test_training_on_loopback_gives_complete_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    path, console = tmp_path / "runs.jsonl", text_console()
    records, interrupted = trained(TRAIN, path, console)
    assert not interrupted
    assert [record.spec for record in records] == list(TRAIN.case_order)
    assert read([path]) == records
    alone, dense, half, ours = (r for r in records if isinstance(r, TrainRecord))
    for record in (alone, dense, half, ours):
        assert (record.status, record.error, record.shaped) == ("done", None, False)
        assert record.step_ms is not None
        # All workers share the loopback, so its counters cannot count one worker.
        assert record.interface_bytes is None
        assert record.compute_ms == alone.step_ms
        assert record.scaling_efficiency == (alone.step_ms or 0) / record.step_ms
    assert (alone.points, alone.losses, alone.sent_bytes) == ((), (), 0)
    assert (alone.metric, alone.target_loss, alone.time_to_target_s) == (None, None, None)
    for record in (dense, half, ours):
        assert [point.step for point in record.points] == [0, 2, 4]
        assert record.final_loss is not None
        assert math.isfinite(record.final_loss)
        assert len(record.losses) == 4
        assert record.points[-1].metric == record.metric
    # Models and data are equal, so the first evaluation and the first loss are, too.
    assert len({(r.points[0].loss, r.losses[0]) for r in (dense, half, ours)}) == 1
    assert dense.losses[-1] != half.losses[-1]
    assert (dense.backend, ours.backend) == (None, kernels.backend_for(torch.device("cpu")))
    assert dense.sent_bytes == 2 * (half.sent_bytes or 0)
    assert 0 < (ours.sent_bytes or 0) < (half.sent_bytes or 0)
    assert dense.encode_ms is None
    assert ours.encode_ms is not None
    assert "links are not shaped" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("emulated")
def test_a_sync_in_flight_after_the_last_step_is_counted() -> None:
    late = tuple(
        f"none @ local=(local_sgd:sync_every=2{delay})" for delay in ("", ",delay=1", ",delay=2")
    )
    job = replace(STEP, workload="mlp:hidden=256,batch_size=4", case_order=late * 2)
    records, _ = stepped(job, text_console())
    for record in (r for r in records if isinstance(r, StepRecord)):
        assert record.sent_bytes is not None
        assert record.interface_bytes is not None
        assert record.sent_bytes <= record.interface_bytes <= 1.1 * record.sent_bytes, record.spec


def test_blocks_on_loopback_outlive_a_case_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    records, _ = stepped(STEP, text_console())
    by_spec = {r.spec: r for r in records if isinstance(r, StepRecord)}
    assert by_spec.keys() == set(STEP.case_order)
    failed = by_spec.pop("no-such-method")
    assert failed.status == "failed"
    assert "no compressor named 'no-such-method'" in (failed.error or "")
    assert all((r.status, r.steps) == ("done", 6) for r in by_spec.values())
    assert by_spec["ddp-fp32"].sent_bytes == 4 * HIDDEN_64_PARAMETERS
    assert by_spec["none"].sent_bytes == 4 * HIDDEN_64_PARAMETERS
    low_rank = sum((784 + 64, 64 + 64, 64 + 10))
    # torch sends the vectors as they are.
    assert by_spec["torch-powersgd:rank=1"].sent_bytes == 4 * (low_rank + 64 + 64 + 10)
    assert by_spec["ddp-fp32"].ratio_to_dense == 1


def all_well(job: Job) -> Iterator[Message]:
    for case in job.case_order:
        yield Started(case=case)
        yield Tick(case=case, step=1, step_ms=1.0)
        yield evaluated(case, 0, 3.0)
        yield evaluated(case, 4, 1.0)
        yield finished(case)


def fails_in(bad: str) -> Script:
    def script(job: Job) -> Iterator[Message]:
        yield from all_well(replace(job, case_order=job.case_order[: job.case_order.index(bad)]))
        yield Started(case=bad)
        yield Failed(case=bad, error="ValueError: no")
        yield Failed(case=bad, error="the other one is gone")

    return script


def interrupted_in(bad: str) -> Script:
    def script(job: Job) -> Iterator[Message]:
        yield from all_well(replace(job, case_order=job.case_order[: job.case_order.index(bad)]))
        yield Started(case=bad)
        yield evaluated(bad, 0, 3.0)
        raise KeyboardInterrupt

    return script


def silent(job: Job) -> Iterator[Message]:
    yield from ()


def use(monkeypatch: pytest.MonkeyPatch, *scripts: Script) -> ScriptedCluster:
    cluster = ScriptedCluster(list(scripts))
    monkeypatch.setattr(cluster_run, "open_cluster", cluster.open)
    return cluster


def test_after_a_failure_new_workers_take_the_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = use(monkeypatch, fails_in("torch-bf16"), all_well)
    records, _ = trained(TRAIN, None, text_console())
    assert [(r.spec, r.status) for r in records] == [
        ("compute-only", "done"),
        ("ddp-fp32", "done"),
        ("torch-bf16", "failed"),
        ("topk:ratio=0.1", "done"),
    ]
    assert records[2].error == "rank 0: ValueError: no\nand warn"
    assert [job.case_order for job in cluster.jobs] == [TRAIN.case_order, TRAIN.case_order[3:]]


def test_a_failed_case_skips_only_its_own_later_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = use(monkeypatch, fails_in("no-such-method"), all_well)
    records, _ = stepped(STEP, text_console())
    assert cluster.jobs[1].case_order == ("none", "ddp-fp32", "torch-powersgd:rank=1", "none")
    assert {r.spec: r.status for r in records}["no-such-method"] == "failed"


def test_an_interrupt_keeps_the_records_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, interrupted_in("torch-bf16"))
    path = tmp_path / "runs.jsonl"
    records, interrupted = trained(TRAIN, path, text_console())
    assert interrupted
    assert [(r.spec, r.status) for r in records] == [
        ("compute-only", "done"),
        ("ddp-fp32", "done"),
        ("torch-bf16", "interrupted"),
    ]
    assert read([path]) == records


def test_the_record_file_is_checked_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = use(monkeypatch, all_well)
    with pytest.raises(ConfigError, match=r"cannot write records to .*: not a regular file"):
        trained(TRAIN, tmp_path, text_console())
    assert cluster.jobs == []


def test_workers_that_never_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, silent, all_well)
    with pytest.raises(PeerError, match="code 1 before a case: rank 0: and warn"):
        trained(TRAIN, None, text_console())


def test_medians_run_over_all_blocks() -> None:
    provenance = Provenance(2, None, False, "test", {})
    collector = StepCollector(provenance, batch=4, parameters=7, rounds=2)
    assert collector.receive(finished("ddp-fp32", (10.0, 20.0))) is None
    record = collector.receive(finished("ddp-fp32", (30.0, 40.0)))
    assert isinstance(record, StepRecord)
    assert record.step_ms == 25.0
    assert record.step_ms_quantiles == (16.0, 25.0, 34.0)
    assert collector.receive(finished("none", (5.0,))) is None
    [partly] = collector.unfinished()
    assert isinstance(partly, StepRecord)
    assert (partly.spec, partly.status, partly.ratio_to_dense) == ("none", "interrupted", 0.2)


def test_the_target_is_reached_between_two_evaluations() -> None:
    losses = (3.0, math.nan, 2.5, 1.5, 1.0)
    points = [
        Point(step=i, time_s=float(i), loss=loss, sent_bytes=0.0) for i, loss in enumerate(losses)
    ]
    assert time_to_target(points, Target("loss", 2.0, "lower")) == 2.5
    assert time_to_target(points, Target("loss", 3.5, "lower")) == 0.0
    assert time_to_target(points, Target("loss", 0.5, "lower")) is None
    assert time_to_target(points, None) is None
    # Without a metric the target cannot be reached.
    assert time_to_target(points, Target("accuracy", 0.0, "higher")) is None


def test_a_target_may_be_a_metric_that_should_rise() -> None:
    points = [
        Point(step=i, time_s=10.0 * i, loss=1.0, sent_bytes=0.0, metric=metric)
        for i, metric in enumerate((0.1, 0.3, 0.5))
    ]
    assert time_to_target(points, parse_target("0.4", "accuracy", "higher")) == pytest.approx(15)
    assert parse_target("loss=2.5", "accuracy", "higher") == Target("loss", 2.5, "lower")
    assert parse_target("perplexity = 90", "perplexity", "lower").words() == "perplexity 90"


def test_a_port_in_use_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = use(monkeypatch, silent, all_well)
    cluster.error_lines = ["DistNetworkError: code: -98, name: EADDRINUSE"]
    records, _ = trained(TRAIN, None, text_console())
    assert [record.status for record in records] == ["done"] * len(TRAIN.case_order)
    cluster = use(monkeypatch, silent, silent, silent)
    cluster.error_lines = ["DistNetworkError: code: -98, name: EADDRINUSE"]
    with pytest.raises(PeerError, match=r"the rendezvous port was in use, 3 times: rank 0"):
        trained(TRAIN, None, text_console())


def kill_a_worker(message: Message) -> None:
    """Kills a worker, a child of this process, after the first step."""
    if not isinstance(message, Tick):
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
            own = parent == os.getpid() and b"gradwire.bench.worker" in words
            if own and b"RANK=1" in environment:
                os.kill(int(stat.parent.name), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")
def test_a_worker_that_dies_ends_its_case_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    job = replace(TRAIN, case_order=("topk:ratio=0.1",), steps=10_000, evaluate_every=10_000)
    collect = partial(TrainCollector, job=job, workload=parse_workload(job.workload), target=None)
    path = tmp_path / "runs.jsonl"
    run = ClusterRun(job, 2, None, "test", path, watch=kill_a_worker)
    records, interrupted = run.run(collect, text_console())
    assert not interrupted
    assert read([path]) == records
    [record] = records
    assert record.status == "failed"
    assert "ended by SIGKILL" in (record.error or "")
