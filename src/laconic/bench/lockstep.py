"""Training with N workers in lock step on one device: one model, N gradients, one exchange.

After an exchange all workers have the same parameters, so one model serves all of them. Running
means of batch norm are those of worker 0, as on a real cluster, where rank 0 evaluates.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.bench.captured import passes_of
from laconic.bench.forecasts import plan_of
from laconic.bench.passes import Passes
from laconic.bench.trainee import Trainee
from laconic.bench.workload import Evaluation, Workload, update
from laconic.comm.meter import Meter
from laconic.lanes import Lanes
from laconic.simulate import Simulation


@dataclass(frozen=True)
class Crew(Trainee):
    """Workers at the start of a run."""

    workload: Workload
    model: nn.Module
    optimiser: Optimizer
    exchange: Simulation
    seed: int

    @property
    def workers(self) -> int:
        return len(self.exchange.workers)

    @cached_property
    def passes(self) -> Passes:
        return passes_of(self.workload, [self.model] * self.workers, self.seed)

    def step(self, step: int, steps: int) -> Tensor:
        passed = self.passes.run(step)
        parameters = dict(self.model.named_parameters())
        for name, mean in self.exchange.step(passed.gradients).items():
            parameters[name].grad = mean
        update(self.workload, self.model, self.optimiser, step, steps)
        return passed.losses

    def evaluate(self) -> Evaluation:
        return self.workload.evaluate(self.model)

    def meter(self) -> Meter:
        return self.exchange.network.meters[0]


def crew_of(workload: Workload, case: str, workers: int, seed: int) -> Crew:
    """Workers who exchange their gradients as a case says."""
    torch.manual_seed(seed)
    model = workload.build().to(workload.device)
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    plan = plan_of(case, tensors, workers)
    lanes = [Lanes(plan, tensors, rank, workers, seed) for rank in range(workers)]
    return Crew(workload, model, workload.optimiser(model), Simulation(lanes), seed)
