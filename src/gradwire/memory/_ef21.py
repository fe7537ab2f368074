"""EF21's bookkeeping: say how a target differs from what the others know of it already."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import Given, Mixed, State


def start(numel: int, device: torch.device) -> State:
    """What this worker has said so far, and the mean of that over all workers."""
    return {"own": torch.zeros(numel, device=device), "mean": torch.zeros(numel, device=device)}


def known_to_all(states: Sequence[State]) -> State:
    """A start for other ranks: as if each had said the mean, which the mean of all then is."""
    mean = states[0]["mean"]
    return {"own": mean.clone(), "mean": mean.clone()}


def ahead(target: Tensor, now: State) -> Given:
    """What the target is ahead of what was said."""
    difference = target - now["own"]
    # As a residual of nothing, so that it is still there when what was said has to be told.
    return Mixed(torch.zeros_like(difference), difference, torch.empty_like(difference))


def caught_up(given: Given, mean: Tensor, now: State, then: State) -> Tensor:
    """Adds what was said on both sides; returns the mean of all that workers have said.

    Where that is not finite the result is not either, but what is kept stays as it was.
    """
    assert given.residual is not None
    assert given.left is not None
    # An entry that was not chosen has left all it was ahead: it does not move by one bit.
    own = now["own"] + (given.residual - given.left)
    total = mean.add_(now["mean"])
    good = total.isfinite()
    then["own"] = torch.where(good & own.isfinite(), own, now["own"])
    then["mean"] = torch.where(good, total, now["mean"])
    return total
