"""What a memory must be: it keeps the part of a gradient that was not sent."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.types import EFInput, State


class Memory(ABC):
    """What becomes of the part of a gradient that was not sent.

    A step reads `now`, what was kept, and fills `then`, what will be kept if the step counts, by
    the end of `after`. Both may be one and the same, where nothing has to be taken back.
    """

    examples: ClassVar[Sequence[Mapping[str, object]]]
    needs_contraction: ClassVar[bool]
    loss_scaled_keys: ClassVar[tuple[str, ...]]
    """What of its state is in units of the gradient, and so follows the loss scale."""
    separates_residual: ClassVar[bool]
    """It gives the gradient as it came, and what waits of those before beside it."""
    is_debt: ClassVar[bool]
    """What was not said is a step still to be made, and not the difference to a known gradient."""

    @abstractmethod
    def state(self, numel: int, device: torch.device) -> State: ...

    @abstractmethod
    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        """What the lane has to say for this gradient (flat), which stays as it is."""

    @abstractmethod
    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        """Keeps `ef.residual_out`, and returns what the gradient becomes: mostly the mean that came."""

    @abstractmethod
    def rescale(self, state: State, factor: float) -> None:
        """Multiplies what waits to be sent, when the learning rate has changed by 1/`factor`."""

    @abstractmethod
    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        """The state that stands for those of other ranks, each with its weight.

        Weights are for what waits; a memory that keeps gradients takes their plain mean.
        """

    @abstractmethod
    def unsent(self, state: State) -> Tensor | None:
        """What has been given and not been sent yet, if that is what this memory keeps."""


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of the tensors, each with its weight, in the order given."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight:
            total.add_(tensor, alpha=weight)
    return total
