"""Cases of local methods: parsing, and runs with two workers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import parse_case, split_cases
from gradwire.bench.predictions.measured_model import plan_of
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import StepRecord, TrainRecord
from gradwire.bench.runs import cluster_run
from gradwire.bench.runs.step import StepBench
from gradwire.bench.runs.train import TrainBench
from gradwire.bench.worker.run_case import _period_means
from gradwire.bench.worker.time_budget import whole_periods
from gradwire.errors import ConfigError
from gradwire.testbed.cluster import LoopbackCluster

QSPARSE = "topk:ratio=0.1 @ local=(qsparse:sync_every=4)"
PLAIN = "none @ local=(local_sgd:sync_every=4)"
CSER = "grbs:ratio=0.1,block=16 @ local=(cser:sync_every=2,errors=(grbs:ratio=0.5,block=16))"
SOON = "int4 @ local=(qsparse:sync_every=4)"
LATE = "int4 @ local=(qsparse:sync_every=4,delay=3)"
ALL = (
    QSPARSE,
    LATE,
    PLAIN,
    "none @ local=(local_sgd:sync_every=4,delay=1)",
    CSER,
    CSER.replace("(cser", "(block_cser"),
    "fp16 @ local=(diloco:sync_every=4,fragments=2,outer_lr=0.5)",
    "chunktopk:k=64,chunk=4096 | codebook:bits=2 @ local=(sparseloco:sync_every=4)",
    "codebook:bits=2 @ local=(muloco:sync_every=4,fragments=2,delay=1,anchors=bf16)",
    "topk:ratio=0.1 @ local=(async_qsparse:sync_every=4,gaps=random)",
)


@pytest.mark.parametrize("text", ALL)
def test_every_method_has_a_case(text: str) -> None:
    assert isinstance(parse_case(text), LocalCase)
    assert split_cases([f"efsign,{text},none"]) == ("efsign", text, "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none @ local=(qsprase:sync_every=4)", "no local method named 'qsprase'; did you mean"),
        ("none @ local=qsparse", "qsparse: missing parameter ['sync_every']"),
        ("none @ local=(qsparse:sync_every=0)", "QsparseLocalSGD: sync_every must be at least 1"),
        ("none @ local=(diloco:sync_every=4,anchors=disk)", "diloco: anchors must be one of"),
        ("none @ local=(diloco:sync_every=4,decay=1)", "diloco: unknown parameter ['decay']"),
        ("int4 @ local=(qsparse:sync_every=4,delay=5)", "delay must be 0 to 4, got 5"),
        ("none @ local=(block_cser:sync_every=4,delay=1)", "unknown parameter ['delay']"),
        ("efsign @ local=(local_sgd:sync_every=4)", "local_sgd: sends parameters uncompressed"),
        ("terngrad @ local=(qsparse:sync_every=4)", "terngrad does not go with memory"),
        ("none @ local=(qsparse:sync_every=4", "brackets do not match in"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_case(text)
    assert message in str(error.value)


def test_a_local_method_has_no_forecast() -> None:
    with pytest.raises(ConfigError, match="not all of its steps are alike"):
        plan_of(QSPARSE, {}, 2)


def test_a_step_is_as_long_as_the_mean_of_its_period() -> None:
    assert _period_means([1.0, 1.0, 4.0, 1.0, 1.0, 7.0, 9.0], 3) == (2.0, 2.0, 2.0, 3.0, 3.0, 3.0)
    assert _period_means([1.0, 2.0], 3) == (1.5, 1.5)
    assert _period_means([1.0, 2.0], 1) == (1.0, 2.0)
    assert [whole_periods(steps, 4) for steps in (0, 1, 4, 5)] == [0, 4, 4, 8]


def loopback(workers: int, rate: str | None) -> "_Opened":
    return _Opened(workers)


class _Opened:
    def __init__(self, workers: int) -> None:
        self.cluster = LoopbackCluster(workers)

    def __enter__(self) -> LoopbackCluster:
        return self.cluster

    def __exit__(self, *_: object) -> None:
        pass


def test_blocks_have_whole_periods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Local SGD sends as much as a dense step, but only every fourth time."""
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    path, cases = tmp_path / "step.jsonl", ("ddp-fp32", PLAIN, CSER, SOON, LATE)
    bench = StepBench(cases, 2, None, 6, 1, None, path, "c", workload="mlp-tiny")
    assert bench.run(Console(file=io.StringIO())) == "done"
    found = {r.spec: r for r in read([path]) if isinstance(r, StepRecord)}
    dense, plain, cser, soon, late = (found[case] for case in cases)
    assert [r.status for r in found.values()] == ["done"] * 5
    assert [r.steps for r in (dense, plain, cser, soon, late)] == [6, 12, 6, 12, 12]
    assert plain.sent_bytes == (dense.sent_bytes or 0) / 4
    assert 0 < (cser.sent_bytes or 0) < (dense.sent_bytes or 0)
    assert 0 < (late.sent_bytes or 0) < (plain.sent_bytes or 0)
    assert late.sent_bytes == soon.sent_bytes


def test_workers_train_and_are_evaluated_as_one_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    path = tmp_path / "train.jsonl"
    bench = TrainBench(
        workload="mlp-tiny",
        cases=("ddp-fp32", QSPARSE),
        seeds=(0,),
        workers=2,
        rate=None,
        steps=24,
        evaluate_every=8,
        command="c",
        json_path=path,
    )
    assert bench.run(Console(file=io.StringIO())) == "done"
    found = {r.spec: r for r in read([path]) if isinstance(r, TrainRecord)}
    dense, local = found["ddp-fp32"], found[QSPARSE]
    assert (local.status, local.error) == ("done", None)
    assert [point.step for point in local.points] == [0, 8, 16, 24]
    assert local.points[0].loss == dense.points[0].loss
    assert local.points[-1].loss < local.points[0].loss
    assert len(local.losses) == 24
    assert 0 < (local.sent_bytes or 0) < (dense.sent_bytes or 0) / 20
