"""Drift of parameters from a base: capture it, and apply a delayed mean of it."""

import torch

from gradwire.kernels.specs import Drifted


def depart(drifted: Drifted, ahead: float) -> None:
    """The drift becomes base - here; all but the share `ahead` of it is undone, and base there."""
    here, base, _, drift = drifted
    torch._foreach_copy_(drift, base)
    torch._foreach_sub_(drift, here)
    if ahead < 1:
        torch._foreach_add_(here, drift, alpha=1 - ahead)
    torch._foreach_copy_(base, here)


def arrive(drifted: Drifted, rate: float) -> None:
    """The anchor moves by -rate * mean, and `here` to it, but for the steps here - base.

    These are still to be told, and base is so far from `here` as before.
    """
    here, base, anchor, mean = drifted
    torch._foreach_sub_(anchor, mean, alpha=rate)
    since = torch._foreach_sub(here, base)
    torch._foreach_copy_(here, torch._foreach_add(anchor, since))
    torch._foreach_copy_(base, here)
    torch._foreach_sub_(base, since)


def relay(drifted: Drifted, rate: float, ahead: float) -> None:
    """Arrives by the mean, and departs, with the next drift in its place."""
    arrive(drifted, rate)
    depart(drifted, ahead)
