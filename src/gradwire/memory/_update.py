"""The moments of an optimiser: of every worker's own gradients, or of their mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory, UpdateRule, weighted_sum
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class LocalUpdate(Memory):
    """Sends the update that a rule computes from this worker's gradients, and keeps its moments.

    `inner` keeps what was not sent of the updates. The moments never travel; learning rate and
    weight decay are applied to the mean, so neither is part of the residual.
    """

    rule: UpdateRule
    inner: Memory
    shape: tuple[int, ...]

    examples: ClassVar = ()
    needs_contraction: ClassVar = False
    # The engine divides gradients by the loss scale, so no state depends on it.
    loss_scaled_keys: ClassVar = ()
    separates_residual: ClassVar = True
    is_debt: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {**self.rule.state(numel, device), **self.inner.state(numel, device)}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        """Returns the input of the compressor; the update overwrites the gradient."""
        if self.rule.clip:
            # In float64, since the sum of squares may overflow float32.
            size = grad.norm(dtype=torch.float64)
            grad = grad.mul_((self.rule.clip / size).clamp(max=1).to(grad.dtype))
        update = self.rule.update(grad.view(self.shape), state, pending)
        return self.inner.before(update.view(-1), state, pending)

    @property
    def keeps_mean(self) -> bool:
        return self.rule.keeps_mean

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        """Returns the update that parameters take, for the mean of what was sent."""
        mean = self.inner.after(ef, mean, state, pending)
        return self.rule.of_mean(mean.view(self.shape), state, pending).view(-1)

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        """Takes the mean of the moments over ranks, and combines what was not sent by weights."""
        return {**_mean_moments(self.rule, states), **self.inner.combined(states, weights)}

    def unsent(self, state: State) -> Tensor | None:
        return self.inner.unsent(state)

    def rescale(self, state: State, factor: float) -> None:
        self.inner.rescale(state, factor)


@dataclass(frozen=True)
class MeanUpdate(Memory):
    """Sends gradients as they are, and keeps the moments of an optimiser that takes their mean.

    The optimiser changes them after the exchange, equally on all ranks.
    """

    rule: UpdateRule

    examples: ClassVar = ()
    needs_contraction: ClassVar = False
    loss_scaled_keys: ClassVar = ()
    separates_residual: ClassVar = False
    is_debt: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return self.rule.state(numel, device)

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return EFInput(grad)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return _mean_moments(self.rule, states)

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        """Does nothing: nothing waits to be sent."""


def moment_keys(rule: UpdateRule) -> list[str]:
    """Returns the keys of a rule's moments in the state of a lane."""
    return list(rule.state(0, torch.device("cpu")))


def _mean_moments(rule: UpdateRule, states: Sequence[State]) -> State:
    """Returns the mean over ranks of the moments; all ranks have made as many steps."""
    equal = [1 / len(states)] * len(states)
    found = {key: [state[key] for state in states] for key in moment_keys(rule)}
    return {
        key: weighted_sum(some, equal) if some[0].dim() else some[0].clone()
        for key, some in found.items()
    }


def kept_moments(memory: Memory, before: Memory, state: State) -> State:
    """Returns the moments in a state that another memory of the same rule continues with."""
    kinds = LocalUpdate | MeanUpdate
    if not isinstance(memory, kinds) or not isinstance(before, kinds):
        return {}
    if memory.rule != before.rule:
        return {}
    return {key: state[key] for key in moment_keys(memory.rule)}
