"""Training with N workers in lock step on one device: one model, N gradients, one exchange.

After an exchange all workers have the same parameters, so one model serves all of them. Running
means of batch norm are those of worker 0, as on a real cluster, where rank 0 evaluates.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.bench.captured import passes_of
from laconic.bench.passes import Passes
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

    @cached_property
    def passes(self) -> Passes:
        return passes_of(self.workload, [self.model] * self.workers, self.seed)


def gradients(crew: Crew, step: int) -> list[dict[str, Tensor]]:
    """What each worker computes from its own batch; the next step may write it over."""
    return crew.passes.run(step).gradients


def exchange(crew: Crew, found: list[dict[str, Tensor]]) -> None:
    """Gives the model the mean that all workers receive."""
    parameters = dict(crew.model.named_parameters())
    for name, mean in crew.exchange.step(found).items():
        parameters[name].grad = mean


def train_step(crew: Crew, step: int, steps: int) -> Tensor:
    """Step number `step` of `steps`; all workers' losses, which the next may write over."""
    passed = crew.passes.run(step)
    exchange(crew, passed.gradients)
    update(crew.workload, crew.model, crew.optimiser, step, steps)
    return passed.losses
