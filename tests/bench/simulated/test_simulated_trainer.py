"""Workers in lock step train as one worker would on the mean of their gradients."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire import cli
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.simulated.trainer import ExchangeTrainer, exchange_trainer
from gradwire.bench.workloads.base import Workload, parse_workload, update
from gradwire.errors import ConfigError
from gradwire.simulation import simulate


def trainer(workload: Workload, spec: str, workers: int) -> ExchangeTrainer:
    torch.manual_seed(0)
    model = workload.build()
    exchange = simulate(model, spec, workers=workers)
    return ExchangeTrainer(workload, model, workload.optimiser(model), exchange, seed=0)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_dense_worker_is_plain_training() -> None:
    workload = parse_workload("mlp-tiny")
    ours = trainer(workload, "none", 1)
    torch.manual_seed(0)
    model = workload.build()
    optimiser = workload.optimiser(model)
    for step in range(3):
        ours.step(step, 3)
        optimiser.zero_grad()
        inputs, targets = workload.batch(step, 0, 1, 0)
        workload.loss(model(inputs), targets).backward()
        update(workload, model, optimiser, step, 3)
    assert torch.equal(weights(ours.model), weights(model))


def test_workers_have_their_own_batches() -> None:
    first, second = trainer(parse_workload("mlp-tiny"), "none", 2).passes.run(0).gradients
    assert first.keys() == second.keys()
    assert not torch.equal(first["0.weight"], second["0.weight"])


def test_running_means_are_those_of_the_first_worker() -> None:
    workload = parse_workload("resnet20-tiny")
    one, three = trainer(workload, "none", 3), trainer(workload, "none", 3)
    three.passes.run(0)
    inputs, targets = workload.batch(0, 0, 3, 0)
    workload.loss(one.model(inputs), targets)
    pairs = list(zip(one.model.buffers(), three.model.buffers(), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


def test_records_of_simulated_training_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    words = "simulate --workload mlp-tiny --workers 3 --case none,efsign --steps 4"
    words += f" --evaluate-every 2 --rate 10mbit --json {path}"
    monkeypatch.setattr("sys.argv", ["gradwire", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "(simulated)" in shown
    dense, signs = read([path])
    assert isinstance(dense, TrainRecord)
    assert isinstance(signs, TrainRecord)
    assert dense.simulated
    assert [point.step for point in signs.points] == [0, 2, 4]
    assert signs.step_ms is not None
    assert signs.points[-1].time_s == pytest.approx(4 * signs.step_ms / 1e3)
    assert dense.sent_bytes == dense.dense_bytes
    assert (signs.ratio or 0) > 5
    assert signs.lockstep_ms
    assert f"efsign: a step of 3 workers took {signs.lockstep_ms:.1f} ms here" in shown
    # A record without this field is one of a real run.
    row = json.loads(path.read_text().splitlines()[0])
    del row["simulated"]
    path.write_text(json.dumps(row))
    [old] = read([path])
    assert isinstance(old, TrainRecord)
    assert not old.simulated


def test_dropped_momentum_moves_to_the_memory() -> None:
    workload = parse_workload("resnet20-tiny")
    case = "topk:ratio=1,values=fp32 @ memory=(momentum:momentum=0.9), drop_momentum=true"
    ours = exchange_trainer(workload, case, 1, 0)
    assert ours.optimiser.param_groups[0]["momentum"] == 0
    assert not ours.optimiser.param_groups[0]["nesterov"]
    assert workload.optimiser(ours.model).param_groups[0]["momentum"] == 0.9
    adam = parse_workload("neumf-tiny")
    with pytest.raises(ConfigError, match="only SGD has a momentum to drop, got Adam"):
        exchange_trainer(adam, case, 1, 0)


def test_workers_of_demo_send_their_momentum() -> None:
    """A step is as long as the learning rate in every entry, but for the decay of matrices."""
    workload = parse_workload("gpt2-tiny:synthetic=true")
    merge = "memory=(residual:decay=0.999),exchange=(gather:aggregate=coincident)"
    trainer = exchange_trainer(workload, f"chunktopk:k=4,chunk=64 @ side=demo,{merge}", 2, 0)
    bias = trainer.model.get_parameter("norm.bias")
    before = bias.detach().clone()
    trainer.step(0, 10)
    rate = workload.learning_rate_at(0.05)
    torch.testing.assert_close((bias - before).abs(), torch.full_like(bias, rate))
    states = [worker.lanes["tokens.weight"].memory_state for worker in trainer.exchange.workers]
    assert not torch.equal(states[0]["residual"], states[1]["residual"])
