"""Jobs for the ranks of the adviser's test."""

from typing import Any

import small_model
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refusals() -> dict[str, str]:
    """Returns the adviser's error messages, by the wrong argument."""
    ddp = DDP(small_model.model())
    bad: dict[str, dict[str, Any]] = {
        "loss": {"loss": 3},
        "optimizer": {"optimizer": "sgd"},
        "group": {"process_group": "world"},
        "one spec": {"specs": "nope"},
        "specs": {"specs": 3},
        "a spec": {"specs": ["efsign", 3]},
    }
    found = {}
    for key, wrong in bad.items():
        try:
            gradwire.advise(ddp, **{"loss": small_model.loss, "optimizer": sgd, **wrong})
        except gradwire.ConfigError as error:
            found[key] = str(error)
    return found


def advised(specs: list[str]) -> tuple[str, bool]:
    """Returns the advice as text, and whether the model is unchanged."""
    ddp = DDP(small_model.model())
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    advice = gradwire.advise(ddp, lambda model: small_model.loss(model, 0), optimizer, specs=specs)
    pairs = zip(before, ddp.parameters(), strict=True)
    return str(advice), all(torch.equal(a, b) and b.grad is None for a, b in pairs)
