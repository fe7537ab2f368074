"""EF21 with momentum: workers say how a running mean of gradients differs from what is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory, weighted_sum
from gradwire.checks import check_fraction
from gradwire.memory._ef21 import ahead, caught_up, known_to_all, start
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class EF21SGDM(Memory):
    """Keeps v = (1 - eta) v + eta g, and sends c = C(v - h), where h is all that was said so far.

    All ranks add up the mean of c, and that sum is the gradient. The running mean takes the noise
    of small batches out of the difference, so that EF21 converges with any batch size (Fatkhullin,
    Tyurin & Richtarik 2023, arXiv:2305.15155); with eta 1 it is EF21. v starts at the first
    gradient that is not all zero. The result has momentum already: use an optimiser without. Where
    a mean is not finite the result is not either, but nothing that is kept becomes so.
    """

    eta: float = 0.1

    examples: ClassVar = ({}, {"eta": 0.5})
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("momentum", "own", "mean")
    separates_residual: ClassVar = False
    is_debt: ClassVar = False

    def __post_init__(self) -> None:
        check_fraction("ef21-sgdm", "eta", self.eta)

    def state(self, numel: int, device: torch.device) -> State:
        return {"momentum": torch.zeros(numel, device=device), **start(numel, device)}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        kept = state["momentum"]
        momentum = kept.lerp(grad, _rate(kept, self.eta))
        pending["momentum"] = torch.where(momentum.isfinite(), momentum, kept)
        return ahead(momentum, state)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return caught_up(ef, mean, state, pending)

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        momentum = weighted_sum([s["momentum"] for s in states], [1 / len(states)] * len(states))
        return {"momentum": momentum, **known_to_all(states)}

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        # What is kept is no debt but a gradient, and that is the same under any learning rate.
        pass


def _rate(kept: Tensor, eta: float) -> Tensor:
    """The first gradient counts in full; both numbers are made where they are needed."""
    return torch.where(kept.any(), kept.new_full((), eta), kept.new_full((), 1.0))
