"""Drift of parameters from a base: capture it, and apply a delayed mean of it."""

import torch

from gradwire.kernels.specs import DriftTensors


def capture_drift(drifts: DriftTensors, lookahead: float) -> None:
    """drift = base - params; params += (1 - lookahead) * drift; base = params."""
    params, base, _, drift = drifts
    torch._foreach_copy_(drift, base)
    torch._foreach_sub_(drift, params)
    if lookahead < 1:
        torch._foreach_add_(params, drift, alpha=1 - lookahead)
    torch._foreach_copy_(base, params)


def apply_outer_mean(drifts: DriftTensors, rate: float) -> None:
    """anchor -= rate * mean; params = anchor + (params - base), and base moves along with params.

    The local steps params - base have not been sent yet, so they are preserved.
    """
    params, base, anchor, mean = drifts
    torch._foreach_sub_(anchor, mean, alpha=rate)
    unsent = torch._foreach_sub(params, base)
    torch._foreach_copy_(params, torch._foreach_add(anchor, unsent))
    torch._foreach_copy_(base, params)
    torch._foreach_sub_(base, unsent)


def apply_and_capture(drifts: DriftTensors, rate: float, lookahead: float) -> None:
    """Applies the mean in `drifts.drift`, then captures the next drift in its place."""
    apply_outer_mean(drifts, rate)
    capture_drift(drifts, lookahead)
