"""Which steps of steered lanes may be replayed; that they are the same is a GPU's test."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.control.two_level import Gauge, levels
from gradwire.engine.cuda_graphs import is_sampled
from gradwire.engine.engine import Engine
from gradwire.simulate import Simulation


def opened(controller: str) -> Simulation:
    tensors = {"w": torch.zeros(64, 64), "b": torch.zeros(8)}
    return gradwire.simulate(tensors, "topk:ratio=0.1", workers=2, controller=controller)


def gradients(step: int) -> list[dict[str, Tensor]]:
    dice = [torch.Generator().manual_seed(2 * step + rank) for rank in range(2)]
    return [{"w": torch.randn(64, 64, generator=d), "b": torch.ones(8)} for d in dice]


def graph_safe(lanes: Engine) -> bool:
    """Whether the next step could be replayed, as far as its pilot goes."""
    assert lanes.helm is not None
    lanes.settle()
    return not lanes.helm.pilot.measures and not any(map(is_sampled, lanes.lanes.values()))


def told_apart(controller: str, steps: int) -> list[bool]:
    led, found = opened(controller), []
    for step in range(steps):
        found.append(graph_safe(led.workers[0]))
        led.step(gradients(step))
    return found


def test_autopilot_is_steady_but_for_samples_and_what_they_tell() -> None:
    found = told_apart("autopilot", 34)
    unsteady = [step for step, is_steady in enumerate(found) if not is_steady]
    assert unsteady == [0, 1, 16, 17, 32, 33]


def test_accordion_is_steady_but_for_its_checks() -> None:
    found = told_apart("accordion:low=0.1,high=0.01,epoch_steps=5,interval=1", 12)
    # Lanes are sampled once in 100 steps, and an epoch's norms are told in the step after it.
    assert [step for step, is_steady in enumerate(found) if not is_steady] == [0, 5, 10]


def test_gravac_measures_in_every_step_alike() -> None:
    assert told_apart("gravac:low=10,high=1000,window=5", 12) == [False] + 11 * [True]


@pytest.mark.parametrize(
    ("spec", "waits"), [("topk:ratio=0.1", False), ("redsync:ratio=0.1", True)]
)
def test_a_dense_step_waits_if_what_it_measures_does(spec: str, syncs_host: bool) -> None:
    beside = levels(gradwire.parse(spec), 10, 20, "dense", False, Gauge(raw=False))
    assert beside.traits().syncs_host == syncs_host


@pytest.mark.parametrize("change", [True, False])
def test_a_change_of_orders_forgets_what_was_recorded(change: bool) -> None:
    last = 0.01 if change else 0.1
    led = opened(f"schedule:first=0.1,last={last},stages=2,length=4")
    led.step(gradients(0))
    for worker in led.workers:
        worker._recorder._times[("w",)] = 3
    for step in range(1, 6):
        led.step(gradients(step))
    assert all(bool(worker._recorder._times) != change for worker in led.workers)
