"""Steps of controlled lanes that may be replayed; GPU tests check that replays are equal."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.control.two_level import GainMeter, two_level
from gradwire.engine.cuda_graphs import is_sampled
from gradwire.engine.engine import Engine
from gradwire.simulation import Simulation


def simulation(controller: str) -> Simulation:
    tensors = {"w": torch.zeros(64, 64), "b": torch.zeros(8)}
    return gradwire.simulate(tensors, "topk:ratio=0.1", workers=2, controller=controller)


def gradients(step: int) -> list[dict[str, Tensor]]:
    dice = [torch.Generator().manual_seed(2 * step + rank) for rank in range(2)]
    return [{"w": torch.randn(64, 64, generator=d), "b": torch.ones(8)} for d in dice]


def graph_safe(lanes: Engine) -> bool:
    """Returns whether the controller allows the next step to be replayed."""
    assert lanes.observer is not None
    lanes.commit_step()
    return not lanes.observer.state.needs_measurement and not any(
        map(is_sampled, lanes.lanes.values())
    )


def replayable_steps(controller: str, steps: int) -> list[bool]:
    run, found = simulation(controller), []
    for step in range(steps):
        found.append(graph_safe(run.workers[0]))
        run.step(gradients(step))
    return found


def test_autopilot_is_graph_safe_except_for_samples_and_their_exchange() -> None:
    found = replayable_steps("autopilot", 34)
    unsafe = [step for step, is_safe in enumerate(found) if not is_safe]
    assert unsafe == [0, 1, 16, 17, 32, 33]


def test_accordion_is_graph_safe_except_for_its_checks() -> None:
    found = replayable_steps("accordion:low=0.1,high=0.01,epoch_steps=5,interval=1", 12)
    # Lanes are sampled once in 100 steps; the norms of an epoch are sent in the step after it.
    assert [step for step, is_safe in enumerate(found) if not is_safe] == [0, 5, 10]


def test_every_step_of_gravac_is_graph_safe_after_the_first() -> None:
    assert replayable_steps("gravac:low=10,high=1000,window=5", 12) == [False] + 11 * [True]


@pytest.mark.parametrize(
    ("spec", "syncs_host"), [("topk:ratio=0.1", False), ("redsync:ratio=0.1", True)]
)
def test_a_dense_step_syncs_the_host_if_its_measurement_does(spec: str, syncs_host: bool) -> None:
    dense = two_level(gradwire.parse(spec), 10, 20, "dense", False, GainMeter(raw=False))
    assert dense.traits().syncs_host == syncs_host


@pytest.mark.parametrize("change", [True, False])
def test_a_change_of_settings_discards_captured_graphs(change: bool) -> None:
    last = 0.01 if change else 0.1
    run = simulation(f"schedule:first=0.1,last={last},stages=2,length=4")
    run.step(gradients(0))
    for worker in run.workers:
        worker._graphs._stable_steps[("w",)] = 3
    for step in range(1, 6):
        run.step(gradients(step))
    assert all(bool(worker._graphs._stable_steps) != change for worker in run.workers)
