"""Error feedback: what was not sent is added to the next gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory, weighted_sum
from gradwire.checks import check_positive_fraction
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class Residual(Memory):
    """Keeps x - decoded(x) in float32, where x is the gradient plus `decay` times the residual.

    With a contraction and decay 1 nothing is lost, only delayed (Seide 2014, Stich et al. 2018).
    """

    decay: float = 1.0

    examples: ClassVar = ({}, {"decay": 0.9})
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("residual",)
    separates_residual: ClassVar = True
    is_debt: ClassVar = True

    def __post_init__(self) -> None:
        check_positive_fraction("residual", "decay", self.decay)

    def state(self, numel: int, device: torch.device) -> State:
        return {"residual": torch.zeros(numel, device=device)}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return EFInput(grad, state["residual"], pending["residual"], self.decay)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {"residual": weighted_sum([s["residual"] for s in states], weights)}

    def unsent(self, state: State) -> Tensor | None:
        return state["residual"]

    def rescale(self, state: State, factor: float) -> None:
        state["residual"].mul_(factor)
