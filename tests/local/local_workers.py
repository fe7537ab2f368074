"""Workers that train a small regression, each on its own data: simulated, or one real rank."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.local import simulated
from gradwire.local.base import LocalMethod

Method = Callable[..., LocalMethod]
MakeOptimizer = Callable[[nn.Module], Optimizer]


def small_model() -> nn.Sequential:
    """Returns two matrices, which are compressed, with biases, which are sent dense."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 32))


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def momentum_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns a worker's training data; a tenth of the target is its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 40, generator=generator)
    shared = torch.randn(40, 32, generator=torch.Generator().manual_seed(7)) / 6
    own = torch.randn(40, 32, generator=torch.Generator().manual_seed(100 + rank)) / 60
    return inputs, inputs @ (shared + own)


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
    """Returns the top-k of a matrix, or the whole of a vector."""
    if x.dim() < 2:
        return x
    selected = torch.zeros_like(x).view(-1)
    index = x.view(-1).abs().topk(round(ratio * x.numel())).indices
    selected[index] = x.view(-1)[index]
    return selected.view(x.shape)


class SimulatedRun:
    """Simulated workers in lock step; the context enters the method on all of them."""

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
            method(one, its, *args, process_group=worker, **settings)
            for one, its, worker in zip(self.models, self.optimizers, simulated(size), strict=True)
        ]
        self._stack = ExitStack()

    def __enter__(self) -> "SimulatedRun":
        for worker in self.workers:
            self._stack.enter_context(worker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, number: int) -> float:
        """Takes one step of every worker; returns their mean loss."""
        pairs = enumerate(zip(self.models, self.optimizers, strict=True))
        losses = [take_step(model, its, number, rank) for rank, (model, its) in pairs]
        return sum(losses) / len(losses)

    def train(self, steps: int, first: int = 0) -> list[float]:
        return [self.step(number) for number in range(first, first + steps)]

    def weights(self) -> list[Tensor]:
        return [weights(model) for model in self.models]


def trained(method: Method, *args: Any, steps: int, **settings: Any) -> list[Tensor]:
    """Returns every worker's weights after `steps` steps."""
    with SimulatedRun(method, *args, **settings) as run:
        run.train(steps)
    return run.weights()


def all_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)
