"""Optimisers as the adviser needs them: by name, and whether they rescale entries one by one."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.auto.auto import Auto
from gradwire.errors import ConfigError

_RATIO = 100.0
"""Ratio of the two gradients of the test of linearity."""


def find_optimizer(name: str) -> type[Optimizer]:
    """Returns the class of torch.optim with this name, in any case of letters, such as adamw."""
    known = _known()
    if name.lower() in known:
        return known[name.lower()]
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
    raise ConfigError(f"no optimizer named {name!r} in torch.optim{hint}")


def _known() -> Mapping[str, type[Optimizer]]:
    members: Iterable[object] = vars(torch.optim).values()
    classes = [m for m in members if isinstance(m, type) and issubclass(m, Optimizer)]
    # LBFGS evaluates the loss several times a step, and SparseAdam takes sparse gradients only.
    other = (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return {c.__name__.lower(): c for c in classes if c not in other}


def find_adaptive(config: Auto | None, optimizer: Optimizer | None) -> bool | None:
    """Returns whether the optimiser that the automatic mode was given is adaptive, None without.

    Raises ConfigError if it is no optimiser, or was given with a method that makes no use of it.
    """
    if optimizer is None:
        return None
    if config is None:
        raise ConfigError("optimizer is used by auto only, leave it out")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"auto: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    return is_adaptive(optimizer)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Returns whether the first step from zero is not proportional to the gradient.

    Adam and its relatives divide every entry by its running magnitude, Lion takes its sign, Muon
    mixes entries; SGD, with momentum or without, multiplies all of them by one number. The
    optimiser takes one step with a parameter of its own; its groups and state stay as they were.
    """
    groups, state = optimizer.param_groups, optimizer.state
    like = groups[0]["params"][0]
    parameter = nn.Parameter(torch.zeros(2, 2, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    parameter.grad[0, 0] = _RATIO
    group: dict[str, Any] = {**groups[0], "params": [parameter], "lr": 1.0}
    optimizer.param_groups, optimizer.state = [group], defaultdict(dict)
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, optimizer.state = groups, state
    large, small = parameter.detach()[0].tolist()
    return not abs(large - _RATIO * small) <= 0.01 * abs(large)
