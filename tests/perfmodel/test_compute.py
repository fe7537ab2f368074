"""Error messages for models and losses whose steps cannot be measured."""

import re

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import measure


class Half(nn.Module):
    """Has two layers and uses one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.used = nn.Linear(4, 2)
        self.idle = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def whole(net: nn.Module, step: int) -> Tensor:
    out: Tensor = net(torch.ones(3, 4))
    return out.sum()


def measured(net: nn.Module, factor: Tensor) -> None:
    measure(net, lambda net, step: whole(net, step) * factor, lambda: None, steps=1)


def test_parameters_that_get_no_gradient_are_named() -> None:
    message = (
        "no gradient reaches ['idle.weight', 'idle.bias']; freeze them with requires_grad_(False)"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        measured(Half(), torch.ones(()))


def test_frozen_parameters_need_no_gradient() -> None:
    net = Half()
    net.idle.requires_grad_(False)
    measured(net, torch.ones(()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"the loss must be finite, got -?{value}"):
        measured(nn.Linear(4, 2), torch.tensor(value))


def test_a_loss_is_a_tensor() -> None:
    with pytest.raises(ConfigError, match="the loss must be a tensor of one number, got 3"):
        measure(nn.Linear(4, 2), lambda net, step: 3, lambda: None)  # type: ignore[arg-type,return-value]


def test_a_loss_is_one_number() -> None:
    with pytest.raises(ConfigError, match=r"the loss must be one number, got a tensor of \[2\]"):
        measured(nn.Linear(4, 2), torch.ones(2))
