"""Broken states are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.errors import ConfigError

SHAPES = {"weight": (40, 30), "bias": (40,)}


def simulation() -> gradwire.Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return gradwire.simulate(tensors, "topk:ratio=0.05", workers=3)


def gradients() -> list[dict[str, Tensor]]:
    return [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(3)]


BROKEN: dict[str, Callable[[Any], object]] = {
    "no lanes": lambda own: own.pop("lanes"),
    "lanes are None": lambda own: own.update(lanes=None),
    "no step": lambda own: own["lanes"]["bias"].pop("step"),
    "step is a string": lambda own: own["lanes"]["bias"].update(step="x"),
    "a negative step": lambda own: own["lanes"]["bias"].update(step=-1),
    "no memory": lambda own: own["lanes"]["bias"].update(memory=None),
    "a number as aggregator state": lambda own: own["lanes"]["bias"].update(aggregator={"q": 3}),
    "a lane is None": lambda own: own["lanes"].update(bias=None),
    "another dtype": lambda own: own["lanes"]["weight"]["memory"].update(
        residual=torch.zeros(1200, dtype=torch.float64)
    ),
    "loss scale is a string": lambda own: own.update(loss_scale="x"),
    "no loss scale": lambda own: own.pop("loss_scale"),
    "format is a tensor": lambda own: own.update(format=torch.ones(3)),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(defect: str) -> None:
    saved, fresh = simulation(), simulation()
    saved.step(gradients())
    state = saved.state_dict()
    BROKEN[defect](state["0"])
    before = str(fresh.state_dict())
    with pytest.raises(ConfigError, match=r"^state"):
        fresh.load_state_dict(state)
    assert str(fresh.state_dict()) == before


@pytest.mark.parametrize("state", [None, 3, {"0": None}])
def test_an_invalid_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match=r"^state: "):
        simulation().load_state_dict(state)
