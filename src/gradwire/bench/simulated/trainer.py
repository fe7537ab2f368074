"""Simulated trainers: N workers in lock step on one device.

With a gradient exchange all workers have the same parameters after a step, so one model serves all
of them; running means of batch norm are those of worker 0, as on a real cluster, where rank 0
evaluates. With a local method every worker has its own model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.bench.case import Change
from gradwire.bench.cases.local import Around, LocalCase
from gradwire.bench.cases.parse import timeline_of
from gradwire.bench.predictions.measured_model import controller_of, plan_of
from gradwire.bench.simulated.base import Trainee
from gradwire.bench.simulated.clock import Watch, watch_over
from gradwire.bench.simulated.passes import Passes, passes_of
from gradwire.bench.workloads.base import Epochs, Evaluation, Workload, update
from gradwire.comm.meter import Meter
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.local import simulated
from gradwire.perfmodel.predict import Prediction
from gradwire.simulate import Simulation


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
    lanes = [Engine(plan, tensors, r, workers, seed, wants_mean=r == 0) for r in range(workers)]
    return Crew(workload, model, workload.optimiser(model), Simulation(lanes), seed)


class LocalCrew(Trainee):
    """Workers in lock step, each with its own parameters."""

    def __init__(self, workload: Workload, case: LocalCase, workers: int, seed: int) -> None:
        self.workload = workload
        self.models = [_model(workload, seed) for _ in range(workers)]
        self.model = self.models[0]
        self.optimisers = [workload.optimiser(model) for model in self.models]
        self._seats = simulated(workers)
        trios = zip(self.models, self.optimisers, self._seats, strict=True)
        self.members = [case.build(Around(*trio, seed)) for trio in trios]
        self._passes = passes_of(workload, self.models, seed)

    @property
    def workers(self) -> int:
        return len(self.models)

    def step(self, step: int, steps: int) -> Tensor:
        passed = self._passes.run(step)
        trios = zip(self.models, self.optimisers, passed.gradients, strict=True)
        for model, optimiser, gradients in trios:
            for name, gradient in gradients.items():
                model.get_parameter(name).grad = gradient
            update(self.workload, model, optimiser, step, steps)
        return passed.losses

    def evaluate(self) -> Evaluation:
        """Of the mean of all models."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.averaged())
            return self.workload.evaluate(self.model)

    def meter(self) -> Meter:
        return self._seats[0].meter

    def timeline(self) -> tuple[Change, ...]:
        return ()


@contextmanager
def local_crew(workload: Workload, case: LocalCase, workers: int, seed: int) -> Iterator[LocalCrew]:
    """Workers at the start of a run, whose steps are followed until the end of the context."""
    crew = LocalCrew(workload, case, workers, seed)
    with ExitStack() as stack:
        for member in crew.members:
            stack.enter_context(member)
        yield crew


def _model(workload: Workload, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return workload.build().to(workload.device)
