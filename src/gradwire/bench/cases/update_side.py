"""The update side of a case: workers exchange their optimiser's updates instead of gradients.

The workload's own optimiser decides which: AdamW's update, or SGD's momentum; `side=demo` is that
of DeMo. A limit of the gradient's norm then holds for every tensor's gradient on its worker, since
during the backward pass no worker has all gradients yet.
"""

from collections.abc import Mapping
from math import isqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from gradwire.base import UpdateRule
from gradwire.compressors.chunktopk import ChunkTopK
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Settings
from gradwire.memory.residual import Residual
from gradwire.optim import AdamUpdate, AdamW, DeMo, DeMoUpdate
from gradwire.optim.base import CompressedOptimizer
from gradwire.optim.demo import MERGE
from gradwire.optim.sgd import SGDUpdate

Side: TypeAlias = Literal["gradient", "update", "demo"]
"""What workers exchange: gradients, updates of their own optimiser, or DeMo's momentum."""


def demo_method(case: str, plan: Plan) -> tuple[ChunkTopK, Residual]:
    """Returns compressor and memory of a case of DeMo; raises ConfigError if it is none."""
    compressor, memory = plan.compressor, plan.memory
    if (
        isinstance(compressor, ChunkTopK)
        and isqrt(compressor.chunk) ** 2 == compressor.chunk
        and isinstance(memory, Residual)
        and str(plan.exchange) == MERGE
    ):
        return compressor, memory
    raise ConfigError(
        f"{case}: side=demo goes with chunktopk whose chunk is a square number, with "
        f"memory=(residual:decay=0.999) and exchange=({MERGE})"
    )


def rules_of(
    model: nn.Module,
    optimiser: Optimizer,
    clip_norm: float | None,
    workers: int,
    demo: ChunkTopK | None = None,
) -> tuple[tuple[str, UpdateRule], ...]:
    """Returns the update rule of every trained parameter, made of its optimiser group's options.

    With `demo` it is DeMo's, whose tiles have as many coefficients as its chunks.
    """
    if demo is not None:
        rule = DeMoUpdate(isqrt(demo.chunk), clip=clip_norm or 0.0)
        return tuple((name, rule) for name, p in model.named_parameters() if p.requires_grad)
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


def demo_optimiser(
    ddp: DDP, optimiser: Optimizer, method: tuple[ChunkTopK, Residual], seed: int
) -> CompressedOptimizer:
    """Returns DeMo in place of a workload's optimiser, on real workers."""
    compressor, memory = method
    keys = ("params", "lr", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optimiser.param_groups]
    return DeMo(
        ddp,
        decay=memory.decay,
        k=compressor.k,
        side=isqrt(compressor.chunk),
        values=compressor.values,
        params=groups,
        seed=seed,
    )


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
