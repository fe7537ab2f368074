"""Measures the compression error of a method on the gradients of some steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.auto.accuracy_risk import NODES
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.perfmodel.compute import Bucket
from gradwire.simulation import Simulation


def measure_error(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]]
) -> float:
    """Returns the relative error of the last of some steps of two workers (or nodes)."""
    workers = NODES * (plan.node or 1)
    engines = [Engine(plan, tensors, rank, workers, seed=0) for rank in range(workers)]
    simulation = Simulation(engines)
    gradients = [{n: g for bucket in step for n, g in zip(*bucket, strict=True)} for step in steps]
    for number in range(len(gradients)):
        inputs = [gradients[(number + rank) % len(gradients)] for rank in range(workers)]
        total = _mean(
            [
                _gradient_plus_residual(engine, own)
                for engine, own in zip(engines, inputs, strict=True)
            ]
        )
        received = simulation.step(inputs)
    for engine in engines:
        engine.drop_cuda_graphs()
    missing = torch.stack([(total[name] - received[name]).norm() for name in total]).norm()
    whole = torch.stack([tensor.norm() for tensor in total.values()]).norm()
    return float(missing / whole) if whole > 0 else 0.0


def _gradient_plus_residual(lanes: Engine, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a worker's gradients with the residuals of its lanes added."""
    total = {}
    for name, gradient in gradients.items():
        lane = lanes.lanes[name]
        residual = lane.memory.unsent(lane.memory_state)
        total[name] = gradient if residual is None else gradient + residual.view(gradient.shape)
    return total


def _mean(workers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([w[name] for w in workers]).mean(0) for name in workers[0]}
