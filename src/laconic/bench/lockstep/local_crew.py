"""Simulated workers with a model each, who talk as a method for local steps says."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from laconic.bench.case import Change
from laconic.bench.cases.local import LocalCase
from laconic.bench.cases.local_methods import Around
from laconic.bench.lockstep.captured import passes_of
from laconic.bench.lockstep.trainee import Trainee
from laconic.bench.work.workload import Evaluation, Workload, update
from laconic.comm.meter import Meter
from laconic.local import simulated


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
