"""Training with N workers in lock step on one device: one model, N gradients, one exchange.

After an exchange all workers have the same parameters, so one model serves all of them. Running
means of batch norm are those of worker 0, as on a real cluster, where rank 0 evaluates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.bench.workload import Workload, update
from laconic.simulate import Simulation


@dataclass(frozen=True)
class Crew:
    """Workers at the start of a run."""

    workload: Workload
    model: nn.Module
    optimiser: Optimizer
    exchange: Simulation
    seed: int

    @property
    def workers(self) -> int:
        return len(self.exchange.workers)


def gradients(crew: Crew, step: int) -> list[dict[str, Tensor]]:
    """What each worker computes from its own batch."""
    found = [_gradient(crew, step, 0)]
    kept = [buffer.clone() for buffer in crew.model.buffers()]
    found += [_gradient(crew, step, rank) for rank in range(1, crew.workers)]
    for buffer, own in zip(crew.model.buffers(), kept, strict=True):
        buffer.copy_(own)
    return found


def _gradient(crew: Crew, step: int, rank: int) -> dict[str, Tensor]:
    inputs, targets = crew.workload.batch(step, rank, crew.workers, crew.seed)
    trained = {n: p for n, p in crew.model.named_parameters() if p.requires_grad}
    loss = crew.workload.loss(crew.model(inputs), targets)
    # A parameter that had no part in the loss counts as one that need not change.
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    pairs = zip(trained.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def exchange(crew: Crew, found: list[dict[str, Tensor]]) -> None:
    """Gives the model the mean that all workers receive."""
    parameters = dict(crew.model.named_parameters())
    for name, mean in crew.exchange.step(found).items():
        parameters[name].grad = mean


def train_step(crew: Crew, step: int, steps: int) -> None:
    """Step number `step` of `steps`, of all workers."""
    exchange(crew, gradients(crew, step))
    update(crew.workload, crew.model, crew.optimiser, step, steps)
