"""Simulated trainers: N workers in lock step on one device.

With a gradient exchange all workers have the same parameters after a step, so one model serves all
of them; running means of batch norm are those of worker 0, as on a real cluster, where rank 0
evaluates. With a local method every worker has its own model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.attacks import Attackers
from gradwire.auto.optimizers import is_adaptive
from gradwire.bench.case import Change
from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.local_settings import WorkerContext
from gradwire.bench.cases.parse import (
    attacks_of,
    beta1_of,
    drops_momentum,
    remove_momentum,
    side_of,
    timeline_of,
)
from gradwire.bench.cases.update_side import applier_of, demo_method, rules_of, set_beta1
from gradwire.bench.predictions.measured_model import auto_of, controller_of, plan_of
from gradwire.bench.simulated.base import SimulatedTrainer
from gradwire.bench.simulated.clock import RunTimes, track_automatic, track_times
from gradwire.bench.simulated.passes import Passes, passes_of
from gradwire.bench.workloads.base import Epochs, Evaluation, Workload, update
from gradwire.comm.cost_model import LinkModel
from gradwire.comm.meter import Meter
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.local import simulated
from gradwire.perfmodel.overlap import StepTimes
from gradwire.perfmodel.predict import Prediction
from gradwire.simulation import Simulation


@dataclass(frozen=True)
class ExchangeTrainer(SimulatedTrainer):
    """Simulated workers that exchange gradients and share one model."""

    workload: Workload
    model: nn.Module
    optimiser: Optimizer
    exchange: Simulation
    seed: int
    clips: bool = True
    """False if workers exchange updates, which they compute from gradients that they clipped."""
    _epochs: list[Epochs] = field(default_factory=list, init=False, repr=False)
    """Empty before the first step, which gives the number of steps."""

    @property
    def workers(self) -> int:
        return len(self.exchange.workers)

    @cached_property
    def passes(self) -> Passes:
        return passes_of(self.workload, [self.model] * self.workers, self.seed)

    def step(self, step: int, steps: int) -> Tensor:
        result = self.passes.run(step)
        parameters = dict(self.model.named_parameters())
        for name, mean in self.exchange.step(result.gradients).items():
            parameters[name].grad = mean
        update(self.workload, self.model, self.optimiser, step, steps, clips=self.clips)
        self._report_epochs(step + 1, steps)
        return result.losses

    def _report_epochs(self, step: int, steps: int) -> None:
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

    def track_times(
        self, case: str, predict: Callable[[Plan], Prediction], link: LinkModel
    ) -> RunTimes:
        """Attaches the case's controller, if it has one; returns the predicted step times.

        The automatic mode knows the `link`, as if it had probed it.
        """
        plan = self.exchange.workers[0].plan

        def times(plan: Plan) -> StepTimes:
            return predict(plan).times

        if (auto := auto_of(case)) is not None:
            adaptive = is_adaptive(self.optimiser)
            return track_automatic(self.exchange, auto, plan, times, link, adaptive)
        return track_times(self.exchange, controller_of(case), plan, times)


def exchange_trainer(workload: Workload, case: str, workers: int, seed: int) -> ExchangeTrainer:
    """Builds workers that exchange their gradients by the method of a case."""
    torch.manual_seed(seed)
    model = workload.build().to(workload.device)
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    plan = plan_of(case, tensors, workers, controlled=True)
    optimiser, clips = workload.optimiser(model), True
    if drops_momentum(case):
        remove_momentum(optimiser)
    if (beta1 := beta1_of(case)) is not None:
        set_beta1(optimiser, beta1)
    if (side := side_of(case)) != "gradient":
        demo = demo_method(case, plan)[0] if side == "demo" else None
        rules = rules_of(model, optimiser, workload.clip_norm, workers, demo)
        plan, optimiser, clips = replace(plan, rules=rules), applier_of(optimiser), False
    engines = [Engine(plan, tensors, r, workers, seed, wants_mean=r == 0) for r in range(workers)]
    attacks = attacks_of(case, workers)
    attackers = Attackers(attacks, workers, seed) if attacks else None
    simulation = Simulation(engines, attackers)
    return ExchangeTrainer(workload, model, optimiser, simulation, seed, clips)


class LocalTrainer(SimulatedTrainer):
    """Simulated workers in lock step, each with its own parameters."""

    def __init__(self, workload: Workload, case: LocalCase, workers: int, seed: int) -> None:
        self.workload = workload
        self.models = [_model(workload, seed) for _ in range(workers)]
        self.model = self.models[0]
        self.optimisers = [case.optimiser(m, workload.optimiser(m)) for m in self.models]
        self._workers = simulated(workers)
        triples = zip(self.models, self.optimisers, self._workers, strict=True)
        self.members = [case.build(WorkerContext(*trio, seed)) for trio in triples]
        self._passes = passes_of(workload, self.models, seed)

    @property
    def workers(self) -> int:
        return len(self.models)

    def step(self, step: int, steps: int) -> Tensor:
        result = self._passes.run(step)
        triples = zip(self.models, self.optimisers, result.gradients, strict=True)
        for model, optimiser, gradients in triples:
            for name, gradient in gradients.items():
                model.get_parameter(name).grad = gradient
            update(self.workload, model, optimiser, step, steps)
        return result.losses

    def evaluate(self) -> Evaluation:
        """Evaluates the mean of all models."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.averaged())
            return self.workload.evaluate(self.model)

    def meter(self) -> Meter:
        return self._workers[0].meter

    def timeline(self) -> tuple[Change, ...]:
        return ()


@contextmanager
def local_trainer(
    workload: Workload, case: LocalCase, workers: int, seed: int
) -> Iterator[LocalTrainer]:
    """Builds workers of a local method, which observes their steps until the context ends."""
    trainer = LocalTrainer(workload, case, workers, seed)
    with ExitStack() as stack:
        for member in trainer.members:
            stack.enter_context(member)
        yield trainer


def _model(workload: Workload, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return workload.build().to(workload.device)
