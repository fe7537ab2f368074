"""Optimisers as the adviser needs them: by name, and whether they rescale entries one by one."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.auto.auto import Auto
from gradwire.errors import ConfigError
from gradwire.spec import format_spec

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


COUNTERPARTS: tuple[type[Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam)
"""Optimisers for which `gradwire.optim` has one of the same name."""
_EXCHANGED = ("lr", "betas", "eps", "weight_decay")
"""Their options that it has, too."""


def counterpart_line(config: Auto, optimizer: Optimizer, *, with_scaler: bool) -> str | None:
    """Returns the line that makes an optimiser which exchanges updates in place of this one.

    None if `gradwire.optim` has none that does the same.
    """
    kind = type(optimizer)
    groups = optimizer.param_groups
    if kind not in COUNTERPARTS or any(g["amsgrad"] or g["maximize"] for g in groups):
        return None
    if kind is torch.optim.Adam and any(group["weight_decay"] for group in groups):
        # Torch's Adam adds it to the gradient.
        return None
    arguments = ["model"]
    if len(groups) > 1:
        # Which have their options with them.
        arguments.append("params=optimizer.param_groups")
    else:
        default = signature(kind).parameters
        own = {key: _plain(groups[0][key]) for key in _EXCHANGED}
        arguments += [f"{k}={x!r}" for k, x in own.items() if k == "lr" or x != default[k].default]
    arguments.append(f'compress="{format_spec(config)}"')
    if with_scaler:
        arguments.append("scaler=scaler")
    return f"optimizer = gradwire.optim.{kind.__name__}({', '.join(arguments)})"


def _plain(value: object) -> object:
    """Returns a learning rate that may be a tensor as a number."""
    return float(value) if isinstance(value, Tensor) else value
