"""EF21: every worker says how its gradient differs from what the others know of it already."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.contract import Memory
from laconic.types import Given, State


@dataclass(frozen=True)
class EF21(Memory):
    """Sends c = C(g - h), where h is all that this worker has said so far: h becomes h + c.

    All ranks add up the mean of c, and that sum, the mean of every worker's h, is the gradient.
    While gradients settle, so do differences, and h comes to g itself: unlike without a memory,
    workers whose data differ reach the common optimum (Richtarik, Sokolov & Fatkhullin 2021,
    arXiv:2106.05203). Where a mean is not finite the result is not either, but h is kept as it was.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {"own": torch.zeros(numel, device=device), "mean": torch.zeros(numel, device=device)}

    def before(self, grad: Tensor, state: State) -> Given:
        ahead = grad - state["own"]
        # As a residual of nothing, so that it is still there when what was said has to be told.
        return Given(grad.zero_(), ahead, torch.empty_like(ahead))

    def after(self, given: Given, mean: Tensor, state: State) -> Tensor:
        assert given.residual is not None
        assert given.left is not None
        # An entry that was not chosen has left all it was ahead: its h does not move by one bit.
        own = state["own"] + (given.residual - given.left)
        total = mean.add_(state["mean"])
        good = total.isfinite()
        state["own"] = torch.where(good & own.isfinite(), own, state["own"])
        state["mean"] = torch.where(good, total, state["mean"])
        return total

    def waiting(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        # What is kept is no debt but a gradient, and that is the same under any learning rate.
        pass
