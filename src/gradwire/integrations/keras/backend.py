"""Interface to the framework that holds the gradients, and its torch implementation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

Work: TypeAlias = Callable[[list[Tensor], float], list[Tensor]]
"""Maps gradients and their loss scale to means, in new memory; called in every step."""


class Framework(ABC):
    """A framework with its own types of variables, gradients and scales, here typed as Any."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError if gradients cannot be exchanged in the current context."""

    @abstractmethod
    def without_autograph(self, function: F) -> F:
        """Returns the function marked such that AutoGraph does not convert it."""

    @abstractmethod
    def device(self, variable: Any) -> torch.device:
        """Returns the device on which the variable's gradients are encoded."""

    @abstractmethod
    def dense(self, gradient: Any) -> Any:
        """Returns the gradient as a dense tensor, even if it holds some rows only."""

    @abstractmethod
    def zeros_like(self, variable: Any) -> Any: ...

    @abstractmethod
    def values(self, variables: Sequence[Any]) -> list[Tensor]:
        """Returns the current values of the variables, without a copy."""

    @abstractmethod
    def apply_work(self, work: Work, gradients: Sequence[Any], scale: Any) -> list[Any]:
        """Returns `work(gradients, scale)`, computed now or whenever the surrounding graph runs.

        The gradients are passed without a copy, so `work` must not write to them.
        """


class Torch(Framework):
    """Keras on the torch backend."""

    def check(self) -> None:
        pass

    def without_autograph(self, function: F) -> F:
        return function

    def device(self, variable: Any) -> torch.device:
        device: torch.device = variable.value.device
        return device

    def dense(self, gradient: Any) -> Any:
        return gradient.to_dense() if gradient.is_sparse else gradient

    def zeros_like(self, variable: Any) -> Any:
        return torch.zeros_like(variable.value)

    def values(self, variables: Sequence[Any]) -> list[Tensor]:
        return [variable.value.detach() for variable in variables]

    def apply_work(self, work: Work, gradients: Sequence[Any], scale: Any) -> list[Any]:
        return work([gradient.detach() for gradient in gradients], float(scale))
