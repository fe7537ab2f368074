"""Residuals after a change of the number of ranks."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.state import load_resized, save
from gradwire.errors import ConfigError

SHAPE = (40, 30)


def simulation(workers: int) -> gradwire.Simulation:
    tensors = {"weight": torch.zeros(SHAPE)}
    return gradwire.simulate(tensors, "topk:ratio=0.05", workers=workers, exchange="sharded")


def total_residual(run: gradwire.Simulation) -> Tensor:
    """Returns the sum over ranks; the residuals of shards count once for each rank."""
    lanes = [worker.lanes["weight"] for worker in run.workers]
    server = torch.cat([lane.aggregator_state["server"] for lane in lanes])
    return (
        torch.stack([lane.memory_state["residual"] for lane in lanes]).sum(0) + len(lanes) * server
    )


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 3)])
def test_folding_keeps_the_sum(before: int, after: int) -> None:
    old, new = simulation(before), simulation(after)
    for _ in range(3):
        old.step([{"weight": torch.randn(SHAPE)} for _ in range(before)])
    states = [save(worker) for worker in old.workers]
    for worker in new.workers:
        load_resized(worker, states, "fold")
    assert total_residual(old).norm() > 1
    torch.testing.assert_close(total_residual(new), total_residual(old), rtol=1e-5, atol=1e-5)


def test_states_are_required() -> None:
    with pytest.raises(ConfigError, match="needs the states of all ranks"):
        load_resized(simulation(2).workers[0], [], "fold")
