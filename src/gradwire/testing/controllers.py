"""Properties of a controller, on simulated workers."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.control.base import Controller
from gradwire.control.runtime import ControllerRuntime
from gradwire.errors import ConfigError
from gradwire.identity import identity_of
from gradwire.simulation import Simulation, simulate
from gradwire.spec import compressor_classes, format_spec
from gradwire.testing.case import expect

STEPS = 24
WORKERS = 2
TENSORS = {"a": (64, 48), "b": (48, 40), "c": (7,)}


def controllable(controller: Controller) -> str:
    """Returns the spec of a method of this package that the controller can set."""
    for cls in compressor_classes().values():
        usual = cls(**cls.examples[0])
        try:
            controller.create_state(usual, [], WORKERS)
        except ConfigError:
            continue
        if usual.family != "dense":
            return format_spec(usual)
    raise AssertionError("create_state raises ConfigError for every method of the catalogue")


def _simulation(controller: Controller) -> Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in TENSORS.items()}
    return simulate(tensors, controllable(controller), workers=WORKERS, controller=controller)


def _gradients(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
        for _ in range(WORKERS)
    ]


def _settings(simulation: Simulation, rank: int) -> Mapping[str, object]:
    observer = simulation.workers[rank].observer
    assert isinstance(observer, ControllerRuntime)
    return observer.settings()


def can_be_compared(controller: Controller) -> None:
    """Ranks and saved states can compare its parameters."""
    json.dumps(identity_of(controller))


def ranks_decide_alike(controller: Controller) -> None:
    """After every step all workers have the same settings, since they saw the same numbers."""
    simulation = _simulation(controller)
    for step in range(STEPS):
        simulation.step(_gradients(step))
        if step % 8 == 7:
            simulation.epoch_ended(0.1 / (step + 1))
        one, two = _settings(simulation, 0), _settings(simulation, 1)
        expect(one == two, f"step {step}: worker 0 has {one}, worker 1 has {two}")
    json.dumps(simulation.stats()["controller"])


def resumes_with_its_decisions(controller: Controller) -> None:
    """A run that is saved and loaded makes the same decisions, and the same means."""
    simulation = _simulation(controller)
    for step in range(STEPS // 2):
        simulation.step(_gradients(step))
    again = _simulation(controller)
    state: dict[str, Mapping[str, object]] = {
        rank: dict(own)  # type: ignore[call-overload]
        for rank, own in simulation.state_dict().items()
    }
    again.load_state_dict(state)
    for step in range(STEPS // 2, STEPS):
        here, there = simulation.step(_gradients(step)), again.step(_gradients(step))
        one, two = _settings(simulation, 0), _settings(again, 0)
        expect(one == two, f"step {step}: {one}, but after loading {two}")
        same = all(torch.equal(here[name], there[name]) for name in here)
        expect(same, f"step {step}: the means differ after loading")


PROPERTIES = (can_be_compared, ranks_decide_alike, resumes_with_its_decisions)
