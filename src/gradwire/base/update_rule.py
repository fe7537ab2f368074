"""The base class of update rules, which turn a worker's gradient into its own update."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.types import State


class UpdateRule(ABC):
    """The part of an optimiser that a worker computes alone: its moments, and its update.

    The parameter changes by minus the learning rate times the mean update over workers; learning
    rate and weight decay are no part of it. Subclasses are frozen dataclasses.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = True
    """True if the update of an entry depends on that entry alone, unless a norm is bounded."""
    keeps_mean: ClassVar[bool] = False
    """True if `of_mean` keeps the mean in the state, so that every rank needs it."""
    clip: float
    """The largest norm of a tensor's gradient on this worker; 0 means no limit."""

    @property
    def may_cut(self) -> bool:
        """True if the chunks of a tensor have the updates that the whole has."""
        return self.is_elementwise and not self.clip

    @abstractmethod
    def state(self, numel: int, device: torch.device) -> State:
        """Returns the moments before the first step."""

    @abstractmethod
    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        """Returns the update for a gradient in the shape of its parameter, and fills `pending`.

        The gradient is contiguous float32, and may be overwritten. A gradient that is not finite,
        or overflows a moment, gives an update that is not finite, so that the step is skipped.
        """

    def of_mean(self, mean: Tensor, state: State, pending: State) -> Tensor:
        """Returns the update that parameters take, for the mean of the workers' updates.

        The mean has the shape of the parameter and may be overwritten. By default it is the update.
        """
        return mean

    def dense(self) -> "UpdateRule":
        """Returns the rule that takes the mean gradient, where nothing is compressed."""
        return self
