"""No memory: what was not sent is lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.types import Given, State


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forgets. Right for unbiased methods; others lose accuracy."""

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = False
    units: ClassVar = ()
    keeps_apart: ClassVar = False
    owes: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def before(self, grad: Tensor, now: State, then: State) -> Given:
        return Given(grad)

    def after(self, given: Given, mean: Tensor, now: State, then: State) -> Tensor:
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {}

    def waiting(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        pass
