"""EF21 with momentum: workers send the change of a running mean of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory, weighted_sum
from gradwire.checks import check_positive_fraction
from gradwire.memory._ef21 import apply_sent, difference_input, initial_state, shared_state
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class EF21SGDM(Memory):
    """Keeps v = (1 - eta) v + eta g, and sends c = C(v - h), where h is the sum of all c so far.

    All ranks add up the mean of c, and that sum is the gradient. The running mean takes the noise
    of small batches out of the difference, so that EF21 converges with any batch size (Fatkhullin,
    Tyurin & Richtarik 2023, arXiv:2305.15155); with eta 1 it is EF21. v starts at the first
    gradient that is not all zero. The result has momentum already: use an optimiser without. Where
    a mean is not finite the result is not either, but the state stays finite.
    """

    eta: float = 0.1

    examples: ClassVar = ({}, {"eta": 0.5})
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("momentum", "own", "mean")
    separates_residual: ClassVar = False
    is_debt: ClassVar = False

    def __post_init__(self) -> None:
        check_positive_fraction("ef21-sgdm", "eta", self.eta)

    def state(self, numel: int, device: torch.device) -> State:
        return {"momentum": torch.zeros(numel, device=device), **initial_state(numel, device)}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        previous = state["momentum"]
        momentum = previous.lerp(grad, _rate(previous, self.eta))
        pending["momentum"] = torch.where(momentum.isfinite(), momentum, previous)
        return difference_input(momentum, state)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return apply_sent(ef, mean, state, pending)

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        momentum = weighted_sum([s["momentum"] for s in states], [1 / len(states)] * len(states))
        return {"momentum": momentum, **shared_state(states)}

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        # The state is a gradient, not a pending step: it does not depend on the learning rate.
        pass


def _rate(previous: Tensor, eta: float) -> Tensor:
    """Returns eta, or 1 for the first gradient, as a tensor on the device."""
    return torch.where(previous.any(), previous.new_full((), eta), previous.new_full((), 1.0))
