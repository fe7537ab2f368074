"""State of EF21: sends the difference between a target and the sum of all earlier messages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import CombinedInput, EFInput, State


def initial_state(numel: int, device: torch.device) -> State:
    """Returns the sum of this worker's messages, and the mean of these sums over all workers."""
    return {"own": torch.zeros(numel, device=device), "mean": torch.zeros(numel, device=device)}


def shared_state(states: Sequence[State]) -> State:
    """Returns the state for other ranks: as if each had sent the mean, so that the mean is kept."""
    mean = states[0]["mean"]
    return {"own": mean.clone(), "mean": mean.clone()}


def difference_input(target: Tensor, state: State) -> EFInput:
    """Returns the difference between the target and the sum of this worker's messages."""
    difference = target - state["own"]
    # As the residual of a zero gradient, so that `apply_sent` still has it.
    return CombinedInput(torch.zeros_like(difference), difference, torch.empty_like(difference))


def apply_sent(ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
    """Adds the messages to both sums; returns the mean over all workers of their sums.

    Where that is not finite the result is not either, but the state stays as it was.
    """
    assert ef.residual is not None
    assert ef.residual_out is not None
    # Of an entry that was not sent all is left, so its sum does not change by a bit.
    own = state["own"] + (ef.residual - ef.residual_out)
    total = mean.add_(state["mean"])
    good = total.isfinite()
    pending["own"] = torch.where(good & own.isfinite(), own, state["own"])
    pending["mean"] = torch.where(good, total, state["mean"])
    return total
