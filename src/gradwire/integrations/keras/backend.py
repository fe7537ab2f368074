"""Interface to the framework that holds the gradients, and its torch implementation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

Work: TypeAlias = Callable[[list[Tensor], float], list[Tensor]]
"""Gradients and their loss scale to means, in new memory; done in every step."""


class Framework(ABC):
    """Variables, gradients and scales are of its own types, and so what is typed as Any."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError where a gradient cannot leave for other ranks."""

    @abstractmethod
    def plainly(self, function: F) -> F:
        """The function as Python runs it, also where the framework would translate its callers."""

    @abstractmethod
    def device(self, variable: Any) -> torch.device:
        """Where its gradients are when messages are made of them."""

    @abstractmethod
    def dense(self, gradient: Any) -> Any:
        """The gradient with all its entries, also where it was given by some rows."""

    @abstractmethod
    def zeros_like(self, variable: Any) -> Any: ...

    @abstractmethod
    def values(self, variables: Sequence[Any]) -> list[Tensor]:
        """What variables are now, in their own memory."""

    @abstractmethod
    def through(self, work: Work, gradients: Sequence[Any], scale: Any) -> list[Any]:
        """What work makes of gradients: now, or whenever the graph runs that this is part of.

        Work gets them in their own memory, which it must not write to.
        """


class Torch(Framework):
    """Keras on torch."""

    def check(self) -> None:
        pass

    def plainly(self, function: F) -> F:
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

    def through(self, work: Work, gradients: Sequence[Any], scale: Any) -> list[Any]:
        return work([gradient.detach() for gradient in gradients], float(scale))
