"""Workers that minimise diagonal quadratics of their own: the sum has a known minimum."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradwire.decentralized import simulated
from gradwire.decentralized.base import DecentralizedMethod

SHAPE = (32, 32)
"""Large enough to be compressed."""


class Quadratics:
    """f_i(x) = sum of a_i (x - b_i)^2 / 2, with curvatures in [1, `largest`], in float64."""

    def __init__(self, workers: int, largest: float = 1.5, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(count: int) -> Tensor:
            return torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)

        uniform = torch.rand(workers, *SHAPE, generator=generator, dtype=torch.float64)
        self.curvatures = 1 + (largest - 1) * uniform
        self.minima = 3 * normal(1) + spread * normal(workers)
        total = (self.curvatures * self.minima).sum(0)
        self.optimum = total / self.curvatures.sum(0)

    def gradient(self, rank: int, x: Tensor) -> Tensor:
        return self.curvatures[rank] * (x - self.minima[rank])


class Vector(nn.Module):
    """A model of one matrix, which starts at zero."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))


class QuadraticRun:
    """Simulated workers that descend on their quadratics."""

    def __init__(
        self,
        problem: Quadratics,
        method: Callable[..., DecentralizedMethod],
        *args: Any,
        lr: float,
        **settings: Any,
    ) -> None:
        self.problem, size = problem, len(problem.minima)
        self.models = [Vector() for _ in range(size)]
        self.optimizers = [SGD(model.parameters(), lr=lr) for model in self.models]
        self.workers = [
            method(model, its, *args, process_group=worker, **settings)
            for model, its, worker in zip(
                self.models, self.optimizers, simulated(size), strict=True
            )
        ]

    def step(self) -> list[Tensor]:
        """Takes a step of every worker; returns their gradients."""
        found = []
        for rank, (model, its) in enumerate(zip(self.models, self.optimizers, strict=True)):
            gradient = self.problem.gradient(rank, model.x.detach())
            model.x.grad = gradient.clone()
            its.step()
            found.append(gradient)
        return found

    def matrix(self) -> Tensor:
        """Returns the parameters of all workers, one row each."""
        return torch.stack([model.x.detach().clone().reshape(-1) for model in self.models])

    def error(self) -> float:
        """Returns the distance of all workers from the optimum of the sum, relative to it."""
        star = self.problem.optimum.reshape(-1)
        return float((self.matrix() - star).norm() / (star.norm() * len(self.models) ** 0.5))


@contextmanager
def quadratic_run(
    problem: Quadratics, method: Callable[..., DecentralizedMethod], *args: Any, **settings: Any
) -> Iterator[QuadraticRun]:
    """Enters the method on all workers."""
    run = QuadraticRun(problem, method, *args, **settings)
    with ExitStack() as stack:
        for worker in run.workers:
            stack.enter_context(worker)
        yield run
