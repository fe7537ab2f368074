"""States that are broken, whoever broke them."""

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
    "lanes of nothing": lambda own: own.update(lanes=None),
    "no step": lambda own: own["lanes"]["bias"].pop("step"),
    "step of a text": lambda own: own["lanes"]["bias"].update(step="x"),
    "a negative step": lambda own: own["lanes"]["bias"].update(step=-1),
    "kept of nothing": lambda own: own["lanes"]["bias"].update(kept=None),
    "talk of a number": lambda own: own["lanes"]["bias"].update(talk={"q": 3}),
    "a lane of nothing": lambda own: own["lanes"].update(bias=None),
    "another type": lambda own: own["lanes"]["weight"]["kept"].update(
        residual=torch.zeros(1200, dtype=torch.float64)
    ),
    "a loss scale of a text": lambda own: own.update(loss_scale="x"),
    "no loss scale": lambda own: own.pop("loss_scale"),
    "a format of a tensor": lambda own: own.update(format=torch.ones(3)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_state_is_refused_and_leaves_no_trace(how: str) -> None:
    saved, fresh = simulation(), simulation()
    saved.step(gradients())
    state = saved.state_dict()
    BROKEN[how](state["0"])
    before = str(fresh.state_dict())
    with pytest.raises(ConfigError, match=r"^state"):
        fresh.load_state_dict(state)
    assert str(fresh.state_dict()) == before


@pytest.mark.parametrize("state", [None, 3, {"0": None}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match=r"^state: "):
        simulation().load_state_dict(state)
