"""The bench with workers that share a GPU: over gloo, with timers that synchronize with the GPU."""

import io
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the bench needs the extra 'bench'")

from rich.console import Console

from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.runs.train import TrainBench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def test_workers_share_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    cases = ("compute-only", "ddp-fp32", "torch-fp16", "efsign", "powersgd:rank=1")
    bench = TrainBench(
        workload="resnet9-tiny",
        cases=cases,
        seeds=(0,),
        workers=4,
        rate="1gbit",
        steps=6,
        evaluate_every=3,
        device="cuda",
        command="test",
        json_path=path,
    )
    assert bench.run(Console(file=io.StringIO())) == "done"
    records = [record for record in read([path]) if isinstance(record, TrainRecord)]
    assert [(r.spec, r.status, r.device) for r in records] == [(c, "done", "cuda") for c in cases]
    assert {r.machine["gpu"] for r in records} == {torch.cuda.get_device_name()}
    assert {r.backend for r in records} == {None, "triton"}
    assert all(len(r.losses) == 6 for r in records[1:])
    assert len({r.points[0].loss for r in records[1:]}) == 1
