"""Simulated workers with a model each: every case runs, and dense ones equal a single model."""

import pytest
import torch

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.cases.two_optimisers import MuonAndAdamW
from gradwire.bench.simulated.base import train
from gradwire.bench.simulated.trainer import exchange_trainer, local_trainer
from gradwire.bench.workloads._images import Flat
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

CASES = {
    "dense": "none @ local=(qsparse:sync_every=1)",
    "qtopk": "topk:ratio=0.01 | qsgd:bits=4 @ local=(qsparse:sync_every=8)",
    "late": "int4 @ local=(qsparse:sync_every=2,delay=1)",
    "cser": "grbs:ratio=0.1,block=64 @ local=(cser:sync_every=2,errors=(grbs:ratio=0.5,block=64))",
    "diloco": "none @ local=(diloco:sync_every=2)",
    "sparseloco": "topk:ratio=0.1 @ local=(sparseloco:sync_every=2)",
}


def case_of(name: str) -> LocalCase:
    case = parse_case(CASES[name])
    assert isinstance(case, LocalCase)
    return case


@pytest.mark.parametrize("name", CASES)
def test_every_local_method_runs(name: str) -> None:
    workload = parse_workload("mlp-tiny")
    with local_trainer(workload, case_of(name), workers=2, seed=0) as trainer:
        seen = list(train(trainer, steps=3, evaluate_every=2))
        assert [one.step for one in seen] == [0, 2, 3]
        assert [len(one.losses) for one in seen] == [0, 2, 1]
        assert all(one.evaluation.loss > 0 for one in seen)
        assert trainer.workers == 2


def test_local_steps_of_one_are_dense_ones() -> None:
    workload = parse_workload("mlp-tiny")
    with local_trainer(workload, case_of("dense"), workers=2, seed=1) as trainer:
        ours = list(train(trainer, steps=6, evaluate_every=3))
    dense = list(
        train(exchange_trainer(workload, "none", workers=2, seed=1), steps=6, evaluate_every=3)
    )
    for a, b in zip(ours, dense, strict=True):
        assert a.losses == pytest.approx(b.losses, rel=1e-4)
        assert a.evaluation.loss == pytest.approx(b.evaluation.loss, rel=1e-4)
        assert a.sent_bytes == pytest.approx(b.sent_bytes, rel=1e-3)
    assert ours[-1].sent_bytes > 0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_local_steps_of_muloco_are_those_of_muon() -> None:
    """The workload's schedule sets the rates of both optimisers, which share its parameters."""
    workload = parse_workload("gpt2-tiny:synthetic=true")
    case = parse_case("none @ local=(muloco:sync_every=2)")
    assert isinstance(case, LocalCase)
    with local_trainer(workload, case, workers=2, seed=0) as trainer:
        seen = list(train(trainer, steps=6, evaluate_every=6))
        both = trainer.optimisers[0]
        assert isinstance(both, MuonAndAdamW)
        muon, adamw = both.parts
    names = {p: name for name, p in trainer.models[0].named_parameters()}
    assert {names[p].split(".")[0] for p in muon.param_groups[0]["params"]} == {"blocks"}
    assert {"tokens.weight", "places.weight"} < {names[p] for p in adamw.param_groups[0]["params"]}
    last = workload.learning_rate_at(5.5 / 6)
    assert [group["lr"] for one in (muon, adamw) for group in one.param_groups] == [last, last]
    assert seen[-1].evaluation.loss < seen[0].evaluation.loss
    with pytest.raises(ConfigError, match="muloco: expected a workload with AdamW, got SGD"):
        MuonAndAdamW(trainer.models[0], torch.optim.SGD(trainer.models[0].parameters(), lr=0.1))


def test_workers_differ_between_syncs() -> None:
    workload = parse_workload("mlp-tiny")
    with local_trainer(workload, case_of("qtopk"), workers=2, seed=0) as trainer:
        list(train(trainer, steps=7, evaluate_every=7))
        assert trainer.meter().sent_bytes == 0
        first, second = (next(model.parameters()) for model in trainer.models)
        assert not torch.equal(first, second)
        trainer.step(7, 8)
        assert trainer.meter().sent_bytes > 0


def test_a_flat_model_is_the_same_function() -> None:
    workload = parse_workload("resnet9-tiny")
    torch.manual_seed(0)
    plain = workload.build()
    torch.manual_seed(0)
    flat = Flat(workload.build())
    assert [name for name, _ in flat.named_parameters()] == ["wide", "rest"]
    assert sum(p.numel() for p in flat.parameters()) == sum(p.numel() for p in plain.parameters())
    assert flat.wide.shape[0] == 1
    inputs, targets = workload.batch(0, 0, 1, 0)
    losses = [workload.loss(model(inputs), targets) for model in (plain, flat)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    wide = [g.flatten() for g in grads.values() if g.dim() > 1 and g.numel() >= 1024]
    rest = [g.flatten() for g in grads.values() if g.dim() == 1 or g.numel() < 1024]
    assert wide
    assert torch.equal(flat.wide.grad[0], torch.cat(wide))
    assert torch.equal(flat.rest.grad, torch.cat(rest))
    # Its running means move with it.
    assert torch.equal(
        flat.state_dict()["model.0.1.running_mean"], plain.state_dict()["0.1.running_mean"]
    )
