"""EF21: every worker sends the difference between its gradient and what it has sent so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.memory._ef21 import apply_sent, difference_input, initial_state, shared_state
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class EF21(Memory):
    """Sends c = C(g - h), where h is the sum of all that this worker has sent: h becomes h + c.

    All ranks add up the mean of c, and that sum, the mean of every worker's h, is the gradient.
    As gradients settle, differences vanish and h converges to g: unlike without a memory, workers
    whose data differ reach the common optimum (Richtarik, Sokolov & Fatkhullin 2021,
    arXiv:2106.05203). Where a mean is not finite the result is not either, but h stays as it was.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("own", "mean")
    separates_residual: ClassVar = False
    is_debt: ClassVar = False

    def state(self, numel: int, device: torch.device) -> State:
        return initial_state(numel, device)

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return difference_input(grad, state)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return apply_sent(ef, mean, state, pending)

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return shared_state(states)

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        # The state is a gradient, not a pending step: it does not depend on the learning rate.
        pass
