"""DGC's momentum correction: momentum is applied before the compressor instead of after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory, weighted_sum
from gradwire.errors import ConfigError
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Sends sums v of momentum u: u = momentum u + g, v = v + u; where v is sent, u is reset.

    An entry that is not sent accumulates what plain momentum would have applied to it; once it is
    sent its momentum is stale and is masked (Lin et al. 2018, arXiv:1712.01887). What is masked is
    lost: workers whose gradients differ even at the optimum converge to a point beside it. The
    optimiser must have no momentum. `nesterov`: u = momentum (u + g), v = v + u + g. `clip` above 0
    first bounds the norm of each tensor's gradient on this worker: for N workers and a bound c on
    their mean take c / √N. NaN stays in v, as in the residual.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0

    examples: ClassVar = ({}, {"nesterov": True, "clip": 100.0})
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("momentum", "residual")
    separates_residual: ClassVar = False
    is_debt: ClassVar = True

    def __post_init__(self) -> None:
        numbers = all(isinstance(n, int | float) for n in (self.momentum, self.clip))
        if not numbers or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum: momentum must be in [0, 1), got {self.momentum!r}")
        if not 0 <= self.clip < float("inf"):
            raise ConfigError(f"momentum: clip must be at least 0, got {self.clip!r}")

    def state(self, numel: int, device: torch.device) -> State:
        return {name: torch.zeros(numel, device=device) for name in ("momentum", "residual")}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        if self.clip:
            # In float64, since the sum of squares may overflow float32.
            size = grad.norm(dtype=torch.float64)
            grad = grad * (self.clip / size).clamp(max=1).to(grad.dtype)
        u, v = pending["momentum"], pending["residual"]
        if self.nesterov:
            torch.add(state["momentum"], grad, out=u).mul_(self.momentum)
            torch.add(state["residual"], grad, out=v).add_(u)
        else:
            torch.mul(state["momentum"], self.momentum, out=u).add_(grad)
            torch.add(state["residual"], u, out=v)
        # A copy, since it becomes the mean; `after` compares v with what is left.
        return EFInput(v.clone(), residual_out=torch.empty_like(v))

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        assert ef.residual_out is not None
        sent = pending["residual"] != ef.residual_out
        pending["momentum"].masked_fill_(sent, 0.0)
        pending["residual"] = ef.residual_out
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {k: weighted_sum([s[k] for s in states], weights) for k in states[0]}

    def unsent(self, state: State) -> Tensor | None:
        return state["residual"]

    def rescale(self, state: State, factor: float) -> None:
        # Momentum is no pending step: optimisers do not rescale it with the rate either.
        state["residual"].mul_(factor)
