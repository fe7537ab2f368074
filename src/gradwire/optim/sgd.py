"""SGD's momentum as an update rule, to compare its side of the exchange with the gradient's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import UpdateRule
from gradwire.checks import check_flag, check_fraction_below_one
from gradwire.optim.groups import check_at_least_zero
from gradwire.types import State


@dataclass(frozen=True)
class SGDUpdate(UpdateRule):
    """Momentum of this worker's gradients: m = momentum m + g, with `nesterov` g + momentum m.

    Unlike the memory "momentum" of deep gradient compression it resets nothing that was sent.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0

    name: ClassVar = "sgd"

    def __post_init__(self) -> None:
        check_fraction_below_one("sgd", "momentum", self.momentum)
        check_flag("sgd", "nesterov", self.nesterov)
        check_at_least_zero("sgd", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        return {"momentum_buffer": torch.zeros(numel, device=device)}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        flat, buffer = grad.view(-1), pending["momentum_buffer"]
        torch.mul(state["momentum_buffer"], self.momentum, out=buffer).add_(flat)
        return flat.add_(buffer, alpha=self.momentum) if self.nesterov else flat.copy_(buffer)
