"""EF21: every worker says how its gradient differs from what the others know of it already."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.memory._ef21 import ahead, caught_up, known_to_all, start
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class EF21(Memory):
    """Sends c = C(g - h), where h is all that this worker has said so far: h becomes h + c.

    All ranks add up the mean of c, and that sum, the mean of every worker's h, is the gradient.
    While gradients settle, so do differences, and h comes to g itself: unlike without a memory,
    workers whose data differ reach the common optimum (Richtarik, Sokolov & Fatkhullin 2021,
    arXiv:2106.05203). Where a mean is not finite the result is not either, but h is kept as it was.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("own", "mean")
    separates_residual: ClassVar = False
    is_debt: ClassVar = False

    def state(self, numel: int, device: torch.device) -> State:
        return start(numel, device)

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return ahead(grad, state)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return caught_up(ef, mean, state, pending)

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return known_to_all(states)

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        # What is kept is no debt but a gradient, and that is the same under any learning rate.
        pass
