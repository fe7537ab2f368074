"""No memory: what was not sent is lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class NoMemory(Memory):
    """Keeps nothing. Right for unbiased methods; others lose accuracy."""

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = False
    loss_scaled_keys: ClassVar = ()
    separates_residual: ClassVar = False
    is_debt: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return EFInput(grad)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {}

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        pass
