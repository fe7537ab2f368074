"""Broken states are refused, and so are states of another method and non-finite ones."""

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base import Compressor
from gradwire.checkpoint.state import load, load_resized
from gradwire.compressors.topk import TopK
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
    "loss scale is zero": lambda own: own.update(loss_scale=0.0),
    "no plan": lambda own: own.pop("plan"),
    "a broken plan": lambda own: own.update(plan="{"),
    "a plan that is a list": lambda own: own.update(plan="[]"),
    "a plan of endless depth": lambda own: own.update(plan="[" * 100_000),
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


def saved_state(
    spec: Compressor | str, memory: str | None = None, exchange: str = "auto", **options: Any
) -> tuple[gradwire.Simulation, Any]:
    """Returns a new simulation, and the state of one like it after a step."""
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def make() -> gradwire.Simulation:
        return gradwire.simulate(
            tensors, spec, workers=3, memory=memory, exchange=exchange, **options
        )

    used = make()
    used.step(gradients())
    return make(), used.state_dict()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize(
    ("spec", "memory", "exchange", "part", "key"),
    [
        ("topk:ratio=0.05", "residual", "gather", "memory", "residual"),
        ("topk:ratio=0.05", "momentum", "gather", "memory", "momentum"),
        ("topk:ratio=0.05", "lowbit", "gather", "memory", "scales"),
        ("topk:ratio=0.05", "residual", "sharded", "aggregator", "server"),
        ("powersgd:rank=1", "residual", "auto", "aggregator", "q"),
        ("signum", "none", "auto", "aggregator", "momentum"),
    ],
)
@pytest.mark.parametrize("policy", ["propagate", "ignore"])
def test_a_nonfinite_state_is_refused_by_name(
    spec: str, memory: str, exchange: str, part: str, key: str, policy: str, bad: float
) -> None:
    """A residual with a NaN would send it for ever: also without a guard it is of no use."""
    fresh, state = saved_state(spec, memory, exchange, nan_policy=policy)
    state["1"]["lanes"]["weight"][part][key].view(-1)[1] = bad
    before = str(fresh.state_dict())
    refused = f"^state of weight: {key} of rank 1 has 1 entry that is not finite"
    worker = fresh.workers[1]
    with pytest.raises(ConfigError, match=refused):
        load(worker, state["1"])
    ranks = [state[str(rank)] for rank in range(3)]
    for one in fresh.workers:
        with pytest.raises(ConfigError, match=refused):
            load_resized(one, ranks, "redistribute")
    assert str(fresh.state_dict()) == before


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_nonfinite_residuals_can_be_dropped(exchange: str) -> None:
    fresh, state = saved_state("topk:ratio=0.05", "residual", exchange)
    state["0"]["lanes"]["weight"]["memory"]["residual"].fill_(float("nan"))
    if exchange == "sharded":
        state["2"]["lanes"]["weight"]["aggregator"]["server"].fill_(float("inf"))
    for worker in fresh.workers:
        load_resized(worker, [state[str(rank)] for rank in range(3)], "drop")
    assert fresh.stats()["steps"] == 1
    assert fresh.stats()["residual_norm"] == 0


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_nonfinite_number_of_a_controller_is_refused(text: str) -> None:
    fresh, state = saved_state("topk:ratio=0.05", controller="gravac")
    own = state["0"]
    own["controller"] = own["controller"].replace('"last_gain": 1.0', f'"last_gain": {text}')
    assert text in own["controller"]
    with pytest.raises(ConfigError, match=r"^state: controller: state.last_gain is (nan|inf), not"):
        fresh.load_state_dict(state)


def own_method(name: str, module: str = "__main__", **defaults: float) -> Any:
    """Returns a method as a user's script would define it."""
    fields = [(key, float, value) for key, value in defaults.items()]
    cls = make_dataclass(name, fields, bases=(TopK,), frozen=True)
    cls.__module__ = module
    return cls


@pytest.mark.parametrize(
    ("saved", "loads", "message"),
    [
        (
            TopK(ratio=0.1),
            TopK(ratio=0.05),
            "state: compressor.ratio is 0.1, expected 0.05",
        ),
        (
            TopK(ratio=0.05, values="fp32"),
            TopK(ratio=0.05),
            'state: compressor.values is "fp32", expected "bf16"',
        ),
        (
            "topk:ratio=0.05 | qsgd:bits=4",
            "topk:ratio=0.05 | qsgd:bits=8",
            "state: compressor.quantiser.bits is 4, expected 8",
        ),
        (
            "topk:ratio=0.05",
            "dgc:ratio=0.05",
            'state: compressor.class is "TopK", expected "DGC"',
        ),
        (
            own_method("Mine", ratio=0.05),
            own_method("Mine", ratio=0.1),
            "state: compressor.ratio is 0.05, expected 0.1",
        ),
        (
            own_method("Mine", "one", ratio=0.05),
            own_method("Mine", "two", ratio=0.05),
            'state: compressor.class is "one.Mine", expected "two.Mine"',
        ),
        (
            own_method("Mine", ratio=0.05),
            own_method("Mine", ratio=0.05, extra=2.0),
            "state: compressor.extra is not set, expected 2.0",
        ),
        (
            own_method("Mine", ratio=0.05, extra=2.0),
            own_method("Mine", ratio=0.05),
            "state: compressor.extra is 2.0, expected not set",
        ),
        # A file of this name in another place is not the catalogue's.
        (
            own_method("TopK", "topk", ratio=0.05),
            TopK(ratio=0.05),
            'state: compressor.class is "topk.TopK", expected "TopK"',
        ),
    ],
)
def test_a_state_of_another_method_names_the_first_difference(
    saved: Any, loads: Any, message: str
) -> None:
    _, state = saved_state(saved() if isinstance(saved, type) else saved)
    other, _ = saved_state(loads() if isinstance(loads, type) else loads)
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    assert str(caught.value) == message


def test_defaults_that_have_changed_are_noticed_in_exchanges_too() -> None:
    _, state = saved_state("topk:ratio=0.05", exchange="gather")
    other, _ = saved_state("topk:ratio=0.05", exchange="gather:aggregate=median")
    message = 'state: exchange.aggregate is "mean", expected "median"'
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    assert str(caught.value) == message
    # The default, written out.
    same, _ = saved_state("topk:ratio=0.05", exchange="gather:aggregate=mean")
    same.load_state_dict(state)


def test_a_state_of_another_controller_names_the_first_difference() -> None:
    _, state = saved_state("topk:ratio=0.05", controller="schedule:last=0.1")
    other, _ = saved_state("topk:ratio=0.05", controller="schedule:last=0.2")
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    assert str(caught.value) == "state: controller.last is 0.1, expected 0.2"
