"""A few workers of a small regression, each with data of its own: simulated, or one real rank."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.local import simulated
from gradwire.local.base import LocalSteps

Method = Callable[..., LocalSteps]
MakeOptimizer = Callable[[nn.Module], Optimizer]


def small_model() -> nn.Sequential:
    """Two matrices that are told as the method likes, and vectors that go dense."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 32))


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def momentum_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a worker learns from: for all the same but for a tenth."""
    dice = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 40, generator=dice)
    lesson = torch.randn(40, 32, generator=torch.Generator().manual_seed(7)) / 6
    own = torch.randn(40, 32, generator=torch.Generator().manual_seed(100 + rank)) / 60
    return inputs, inputs @ (lesson + own)


def take_step(model: nn.Module, optimizer: Optimizer, step: int, rank: int) -> float:
    inputs, targets = batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def largest(x: Tensor, ratio: float) -> Tensor:
    """Top-k of a matrix; a vector is told in full."""
    if x.dim() < 2:
        return x
    kept = torch.zeros_like(x).view(-1)
    index = x.view(-1).abs().topk(round(ratio * x.numel())).indices
    kept[index] = x.view(-1)[index]
    return kept.view(x.shape)


class Crew:
    """Simulated workers in lock step; `with crew:` enters the method on all of them."""

    def __init__(
        self,
        method: Method,
        *args: Any,
        size: int = 3,
        optimizer: MakeOptimizer = plain_sgd,
        model: Callable[[], nn.Module] = small_model,
        **settings: Any,
    ) -> None:
        self.models = [model() for _ in range(size)]
        self.optimizers = [optimizer(one) for one in self.models]
        self.workers = [
            method(one, its, *args, process_group=seat, **settings)
            for one, its, seat in zip(self.models, self.optimizers, simulated(size), strict=True)
        ]
        self._stack = ExitStack()

    def __enter__(self) -> "Crew":
        for worker in self.workers:
            self._stack.enter_context(worker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, number: int) -> float:
        """One step of every worker; their mean loss."""
        pairs = enumerate(zip(self.models, self.optimizers, strict=True))
        losses = [take_step(model, its, number, rank) for rank, (model, its) in pairs]
        return sum(losses) / len(losses)

    def train(self, steps: int, first: int = 0) -> list[float]:
        return [self.step(number) for number in range(first, first + steps)]

    def weights(self) -> list[Tensor]:
        return [weights(model) for model in self.models]


def trained(method: Method, *args: Any, steps: int, **settings: Any) -> list[Tensor]:
    """Every worker's weights after so many steps."""
    with Crew(method, *args, **settings) as crew:
        crew.train(steps)
    return crew.weights()


def all_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)
