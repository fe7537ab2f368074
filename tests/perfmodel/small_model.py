"""A model with two buckets, measured in milliseconds."""

import torch
from torch import Tensor, nn

from gradwire.perfmodel.compute import Compute, measure


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 700), nn.Linear(700, 10))


def loss(net: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    output: Tensor = net(inputs)
    return output.square().mean()


def measured(net: nn.Module) -> Compute:
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    return measure(net, loss, lambda: _update(optimiser))


def _update(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
