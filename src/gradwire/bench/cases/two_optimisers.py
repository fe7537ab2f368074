"""Muon and AdamW as the one optimiser that a workload's schedule and steps expect."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.errors import ConfigError
from gradwire.local import muon_and_adamw


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of a model and AdamW for the rest, in place of a workload's AdamW.

    Learning rate, weight decay of matrices and betas are the workload's. Muon takes all parameters
    of two dimensions but embeddings, to which GPT-2's output layer is tied.
    """

    def __init__(self, model: nn.Module, own: Optimizer) -> None:
        first = own.param_groups[0]
        if "betas" not in first:
            raise ConfigError(f"muloco: expected a workload with AdamW, got {type(own).__name__}")
        modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        embedded = {p for module in modules for p in module.parameters()}
        self.parts = muon_and_adamw(
            model,
            first["lr"],
            weight_decay=max(group["weight_decay"] for group in own.param_groups),
            betas=first["betas"],
            matrices=lambda _, p: p.dim() == 2 and p not in embedded,
        )
        # The groups are the parts' own, so that a schedule that sets a rate here sets it there.
        Optimizer.__init__(self, [group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes a step of each; a closure is not supported."""
        assert closure is None
        for part in self.parts:
            part.step()
