"""Parameters that have drifted from a base: what is told of it, and how a late mean is taken up.

`here` is where parameters are, in their own types; all else is float32. All are lists of vectors,
one a parameter, and all but a mean are written in place.
"""

import torch
from torch import Tensor


def depart(here: list[Tensor], base: list[Tensor], drift: list[Tensor], ahead: float) -> None:
    """`drift` becomes base - here, of which all but the share `ahead` is undone; base is there."""
    torch._foreach_copy_(drift, base)
    torch._foreach_sub_(drift, here)
    if ahead < 1:
        torch._foreach_add_(here, drift, alpha=1 - ahead)
    torch._foreach_copy_(base, here)


def arrive(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    mean: list[Tensor],
    rate: float,
) -> None:
    """The anchor moves by -rate * mean, and `here` to it, but for the steps here - base.

    These are still to be told, and base is so far from `here` as before.
    """
    torch._foreach_sub_(anchor, mean, alpha=rate)
    since = torch._foreach_sub(here, base)
    torch._foreach_copy_(here, torch._foreach_add(anchor, since))
    torch._foreach_copy_(base, here)
    torch._foreach_sub_(base, since)


def relay(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    drift: list[Tensor],
    rate: float,
    ahead: float,
) -> None:
    """Arrives by the mean in `drift`, and departs, with the next drift in its place."""
    arrive(here, base, anchor, drift, rate)
    depart(here, base, drift, ahead)
