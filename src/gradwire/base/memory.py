"""The base class of memories, which keep the part of a gradient that was not sent."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.types import EFInput, State


class Memory(ABC):
    """Error feedback: returns to each step what earlier ones did not send, and keeps its error.

    A step reads `state` and fills `pending`, which becomes the state if the step counts. Both may
    be the same dict if steps never have to be discarded.
    """

    examples: ClassVar[Sequence[Mapping[str, object]]]
    needs_contraction: ClassVar[bool]
    loss_scaled_keys: ClassVar[tuple[str, ...]]
    """Keys of the state in units of the gradient, which follow the loss scale."""
    separates_residual: ClassVar[bool]
    """True if `before` returns the gradient and the residual as separate tensors."""
    is_debt: ClassVar[bool]
    """True if what was not sent is an update still to be made, not a difference to a target."""

    @property
    def keeps_mean(self) -> bool:
        """True if the state holds the mean that all ranks receive."""
        return not self.is_debt

    @abstractmethod
    def state(self, numel: int, device: torch.device) -> State: ...

    @abstractmethod
    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        """Returns the compressor's input for this gradient (flat).

        It does not change the gradient, unless an update takes its place (`memory/_update.py`).
        """

    @abstractmethod
    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        """Keeps `ef.residual_out` in `pending`; returns the new gradient, usually the mean."""

    @abstractmethod
    def rescale(self, state: State, factor: float) -> None:
        """Multiplies what waits to be sent; the learning rate was divided by `factor`."""

    @abstractmethod
    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        """Returns the state that replaces those of other ranks, each with its weight.

        Weights apply to what waits to be sent; a memory that keeps gradients takes their mean.
        """

    @abstractmethod
    def unsent(self, state: State) -> Tensor | None:
        """Returns what waits to be sent, if this memory keeps that."""


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the weighted sum of the tensors, added in the order given."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight:
            total.add_(tensor, alpha=weight)
    return total
