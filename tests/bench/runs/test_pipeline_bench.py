"""`bench pipeline`: losses and bytes of stages in one process, and records that can be read."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gradwire.bench.records.files import read
from gradwire.bench.runs.pipeline import PipelineBench
from gradwire.bench.workloads.base import parse_workload, update
from gradwire.errors import ConfigError

TINY = "gpt-tiny:layers=2,batch_size=8,dropout=0"
STEPS = 4


def bench(*cases: str, path: Path | None = None, workload: str = TINY) -> PipelineBench:
    command = "gradwire bench pipeline"
    return PipelineBench(workload, "cpu", 2, 2, cases, STEPS, (0,), path, command)


def plain_losses() -> list[float]:
    """Trains the whole model without stages, with the same micro-batches."""
    workload = parse_workload(TINY)
    torch.manual_seed(0)
    model = workload.build()
    optimiser, losses = workload.optimiser(model), []
    for step in range(STEPS):
        total = torch.zeros(())
        inputs, targets = workload.batch(step, 0, 1, 0)
        for part, target in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            loss = workload.loss(model(part), target) / 2
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        update(workload, model, optimiser, step, STEPS)
        optimiser.zero_grad()
    return losses


def test_records_have_losses_and_exact_bytes(tmp_path: Path) -> None:
    path, console = tmp_path / "pipeline.jsonl", Console(file=StringIO(), width=120)
    records = bench("none / none", "int4 / int8", path=path).run(console)
    assert read([path]) == records
    dense, compressed = records
    assert list(dense.losses) == plain_losses()
    assert compressed.losses[0] != dense.losses[0]
    assert compressed.losses[0] == pytest.approx(dense.losses[0], rel=0.01)
    tensor = 4 * 16 * 16 * 4
    assert dense.dense_bytes == compressed.dense_bytes == 2 * 2 * tensor
    assert dense.sent_bytes == 2 * 2 * (32 + tensor)
    # 1,024 entries: 4 bits and 8 scales of 128, or 8 bits and 4 scales of 256.
    assert compressed.sent_bytes == 2 * (32 + 512 + 32) + 2 * (32 + 1024 + 16)
    assert "int4 / int8" in console.file.getvalue()  # type: ignore[attr-defined]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="a case is two specs such as 'int4 / int8', got 'int4'"):
        bench("int4")
    with pytest.raises(ConfigError, match="powersgd"):
        bench("int4 / powersgd:rank=1")
    with pytest.raises(ConfigError, match="batch size must be a multiple of microbatches"):
        bench("none / none", workload=f"{TINY},batch_size=7".replace("batch_size=8,", ""))
    with pytest.raises(ConfigError, match="mlp has no blocks to cut"):
        bench("none / none", workload="mlp-tiny").run(Console(file=StringIO()))
