"""EF21's bookkeeping: say how a target differs from what the others know of it already."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import CombinedInput, EFInput, State


def start(numel: int, device: torch.device) -> State:
    """What this worker has said so far, and the mean of that over all workers."""
    return {"own": torch.zeros(numel, device=device), "mean": torch.zeros(numel, device=device)}


def known_to_all(states: Sequence[State]) -> State:
    """A start for other ranks: as if each had said the mean, which the mean of all then is."""
    mean = states[0]["mean"]
    return {"own": mean.clone(), "mean": mean.clone()}


def ahead(target: Tensor, state: State) -> EFInput:
    """What the target is ahead of what was said."""
    difference = target - state["own"]
    # As a residual of nothing, so that it is still there when what was said has to be told.
    return CombinedInput(torch.zeros_like(difference), difference, torch.empty_like(difference))


def caught_up(ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
    """Adds what was said on both sides; returns the mean of all that workers have said.

    Where that is not finite the result is not either, but what is kept stays as it was.
    """
    assert ef.residual is not None
    assert ef.residual_out is not None
    # An entry that was not chosen has left all it was ahead: it does not move by one bit.
    own = state["own"] + (ef.residual - ef.residual_out)
    total = mean.add_(state["mean"])
    good = total.isfinite()
    pending["own"] = torch.where(good & own.isfinite(), own, state["own"])
    pending["mean"] = torch.where(good, total, state["mean"])
    return total
