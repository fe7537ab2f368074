"""No memory: what was not sent is lost."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.contract import Memory
from laconic.types import Given, State


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forgets. Right for unbiased methods; others lose accuracy."""

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = False
    keeps_apart: ClassVar = False
    owes: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def before(self, grad: Tensor, state: State) -> Given:
        return Given(grad)

    def after(self, given: Given, mean: Tensor, state: State) -> Tensor:
        return mean

    def waiting(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        pass
