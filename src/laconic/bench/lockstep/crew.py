"""Training with N workers in lock step on one device: one model, N gradients, one exchange.

After an exchange all workers have the same parameters, so one model serves all of them. Running
means of batch norm are those of worker 0, as on a real cluster, where rank 0 evaluates.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.bench.case import Change
from laconic.bench.cases.parse import timeline_of
from laconic.bench.forecast.subject import controller_of, plan_of
from laconic.bench.lockstep.captured import passes_of
from laconic.bench.lockstep.laps import Watch, watch_over
from laconic.bench.lockstep.passes import Passes
from laconic.bench.lockstep.trainee import Trainee
from laconic.bench.work.epochs import Epochs
from laconic.bench.work.workload import Evaluation, Workload, update
from laconic.comm.meter import Meter
from laconic.forecast.forecast import Prediction
from laconic.lanes import Lanes
from laconic.plan import Plan
from laconic.simulate import Simulation


@dataclass(frozen=True)
class Crew(Trainee):
    """Workers at the start of a run."""

    workload: Workload
    model: nn.Module
    optimiser: Optimizer
    exchange: Simulation
    seed: int
    _epochs: list[Epochs] = field(default_factory=list, init=False, repr=False)
    """None before the first step, which says how many there will be."""

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
        self._tell_epochs(step + 1, steps)
        return passed.losses

    def _tell_epochs(self, step: int, steps: int) -> None:
        if not self._epochs:
            self._epochs.append(Epochs(self.workload, self.workers, steps))
        if (rate := self._epochs[0].ended(step)) is not None:
            self.exchange.epoch_ended(rate)

    def evaluate(self) -> Evaluation:
        return self.workload.evaluate(self.model)

    def meter(self) -> Meter:
        return self.exchange.network.meters[0]

    def timeline(self) -> tuple[Change, ...]:
        return timeline_of(self.exchange.stats())

    def watched(self, case: str, predict: Callable[[Plan], Prediction]) -> Watch:
        """What steps take, by forecasts; lets the case's controller steer, if it has one."""
        return watch_over(
            self.exchange,
            controller_of(case),
            self.exchange.workers[0].plan,
            lambda plan: predict(plan).forecast,
        )


def crew_of(workload: Workload, case: str, workers: int, seed: int) -> Crew:
    """Workers who exchange their gradients as a case says."""
    torch.manual_seed(seed)
    model = workload.build().to(workload.device)
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    plan = plan_of(case, tensors, workers, steered=True)
    lanes = [Lanes(plan, tensors, r, workers, seed, listens=r == 0) for r in range(workers)]
    return Crew(workload, model, workload.optimiser(model), Simulation(lanes), seed)
