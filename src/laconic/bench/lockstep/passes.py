"""The passes of all workers in one step, forward and backward: their losses and gradients.

Workers may share a model, as they do where all have the same parameters, or have one each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laconic.bench.work.workload import Workload


class Passed(NamedTuple):
    """What came out of a step, by worker; the next step may write it over."""

    losses: Tensor
    gradients: list[dict[str, Tensor]]


class Passes(ABC):
    """Workers that learn from their own batches; nothing waits for the device."""

    @abstractmethod
    def run(self, step: int) -> Passed:
        """The passes of step number `step`; models are left as they are, but for their buffers.

        Running means of a model that workers share are those of worker 0, as on a real cluster,
        where rank 0 evaluates.
        """


class Eager(Passes):
    """One worker after the other."""

    def __init__(self, workload: Workload, models: Sequence[nn.Module], seed: int) -> None:
        self._workload, self._models, self._seed = workload, models, seed
        # Worker 0 owns a shared model.
        self._lent = [m for m in {id(m): m for m in models}.values() if models.count(m) > 1]

    def run(self, step: int) -> Passed:
        first = self._pass(step, 0)
        kept = [buffer.clone() for model in self._lent for buffer in model.buffers()]
        found = [first, *(self._pass(step, rank) for rank in range(1, len(self._models)))]
        buffers = (buffer for model in self._lent for buffer in model.buffers())
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)
        losses, gradients = zip(*found, strict=True)
        return Passed(torch.stack(losses), list(gradients))

    def _pass(self, step: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = self._workload.batch(step, rank, len(self._models), self._seed)
        model = self._models[rank]
        loss = self._workload.loss(model(inputs), targets)
        return loss.detach(), gradients_of(loss, trained(model))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    # A parameter that had no part in the loss counts as one that need not change.
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
