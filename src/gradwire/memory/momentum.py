"""DGC's momentum correction: momentum is taken before the compressor instead of after it."""

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
    """Sends sums v of momentum u: u = momentum u + g, v = v + u; where v is sent, u starts anew.

    An entry that waits gathers what plain momentum would have done with it meanwhile; after it was
    sent its momentum is stale and is masked (Lin et al. 2018, arXiv:1712.01887). What is masked is
    lost: workers whose gradients differ even at the optimum settle beside it. The optimiser must
    have no momentum of its own. `nesterov` looks ahead: u = momentum (u + g), v = v + u + g. `clip`
    above 0 bounds the norm of each tensor's gradient on this worker first: for N workers and a
    bound c on their mean take c / √N. NaN stays in v, as in the residual.
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
            # The root of a sum of squares, which need not fit into float32.
            size = grad.norm(dtype=torch.float64)
            grad = grad * (self.clip / size).clamp(max=1).to(grad.dtype)
        u, v = pending["momentum"], pending["residual"]
        if self.nesterov:
            torch.add(state["momentum"], grad, out=u).mul_(self.momentum)
            torch.add(state["residual"], grad, out=v).add_(u)
        else:
            torch.mul(state["momentum"], self.momentum, out=u).add_(grad)
            torch.add(state["residual"], u, out=v)
        # A copy, since it becomes the mean; v itself is kept to see what was sent.
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
        # Momentum is no step that waits: optimisers take it on under another rate as it is, too.
        state["residual"].mul_(factor)
