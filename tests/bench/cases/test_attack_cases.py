"""Cases with lying workers: which workers lie, and what is refused."""

import pytest
import torch

from gradwire.attacks import Alie
from gradwire.bench.cases.parse import attacks_of, parse_case
from gradwire.bench.simulated.trainer import exchange_trainer
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

ROBUST = "exchange=(gather:aggregate=diameter,faulty=2)"


def test_the_last_workers_lie() -> None:
    case = f"none @ {ROBUST}, attack=(alie:z=2), liars=2"
    assert attacks_of(case, 6) == {4: Alie(2.0), 5: Alie(2.0)}
    assert attacks_of(f"none @ {ROBUST}", 6) == {}
    assert attacks_of("ddp-fp32", 6) == {}


def test_liars_change_the_training_by_the_mean_and_robust_training_goes_on() -> None:
    workload = parse_workload("mlp-tiny")

    def first_step(case: str) -> torch.Tensor:
        trainer = exchange_trainer(workload, case, 5, seed=0)
        trainer.step(0, 4)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    attack = "attack=nan, liars=2"
    assert not first_step(f"none @ exchange=gather, {attack}").isfinite().all()
    assert first_step(f"none @ {ROBUST}, {attack}").isfinite().all()


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("none @ attack=nan", "attack and liars go together, got attack=nan, liars=0"),
        ("none @ liars=1", "attack and liars go together, got attack=none, liars=1"),
        ("none @ attack=lie, liars=1", "no attack named 'lie'"),
        ("none @ attack=nan, liars=-1", "liars must be at least 0, got -1"),
    ],
)
def test_bad_cases_are_refused_by_name(case: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_case(case)


def test_too_many_liars_are_refused_when_workers_are_known() -> None:
    workload = parse_workload("mlp-tiny")
    with pytest.raises(ConfigError, match="2 liars leave none of 2 workers"):
        exchange_trainer(workload, "none @ attack=nan, liars=2", 2, seed=0)
    with pytest.raises(ConfigError, match="= 5 ranks, got 4"):
        exchange_trainer(workload, f"none @ {ROBUST}, attack=nan, liars=2", 4, seed=0)
