"""The update side of a case: workers exchange their optimiser's updates instead of gradients.

The workload's own optimiser decides which: AdamW's update, or SGD's momentum. A limit of the
gradient's norm then holds for every tensor's gradient on its worker, since during the backward pass
no worker has all gradients yet.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from gradwire.base import UpdateRule
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Settings
from gradwire.optim import AdamUpdate, AdamW
from gradwire.optim.sgd import SGDUpdate


def rules_of(
    model: nn.Module, optimiser: Optimizer, clip_norm: float | None, workers: int
) -> tuple[tuple[str, UpdateRule], ...]:
    """Returns the update rule of every trained parameter, made of its optimiser group's options."""
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    found = {
        names[parameter]: _rule(optimiser, group, clip_norm or 0.0, workers)
        for group in optimiser.param_groups
        for parameter in group["params"]
        if parameter in names
    }
    return tuple((name, found[name]) for name in names.values())


def _rule(optimiser: Optimizer, group: Mapping[str, Any], clip: float, workers: int) -> UpdateRule:
    if isinstance(optimiser, torch.optim.AdamW):
        beta1, beta2 = group["betas"]
        return AdamUpdate(beta1, beta2, group["eps"], clip, workers)
    if isinstance(optimiser, SGD) and not group["dampening"]:
        return SGDUpdate(group["momentum"], group["nesterov"], clip)
    raise ConfigError(
        f"side=update: there is an update of AdamW and of SGD, got {type(optimiser).__name__}"
    )


def set_beta1(optimiser: Optimizer, beta1: float) -> None:
    """Sets the decay of the running mean of gradients; raises ConfigError if there is none."""
    for group in optimiser.param_groups:
        if "betas" not in group:
            raise ConfigError(f"beta1: {type(optimiser).__name__} has no betas, leave beta1 out")
        group["betas"] = (beta1, group["betas"][1])


def applier_of(optimiser: Optimizer) -> SGD:
    """Returns the optimiser that applies mean updates: plain SGD, whose weight decay is decoupled.

    SGD with momentum adds weight decay to gradients, so that it acts 1 / (1 - momentum) times.
    """
    groups = [
        {
            "params": group["params"],
            "lr": group["lr"],
            "weight_decay": group["weight_decay"] / (1 - group.get("momentum", 0.0)),
        }
        for group in optimiser.param_groups
    ]
    return SGD(groups)


def compressed_optimiser(ddp: DDP, optimiser: Optimizer, settings: Settings) -> AdamW:
    """Returns the drop-in replacement of a workload's optimiser, on real workers."""
    if not isinstance(optimiser, torch.optim.AdamW):
        raise ConfigError(
            "side=update: real workers have an update of AdamW only, got "
            f"{type(optimiser).__name__}; simulated ones have SGD's, too"
        )
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optimiser.param_groups]
    return AdamW(ddp, params=groups, compress=settings)
