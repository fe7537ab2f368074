"""A model whose parameters lie in two vectors, so that who handles each one handles few.

Methods that talk at every step would else spend their time in calls for single layers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.plan import Plan

_SMALL = Plan.min_numel


class Flat(nn.Module):
    """The same function with the parameters `wide`, all that a plan compresses, and `rest`.

    A method then chooses among all layers instead of in each.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        named = {name: p.detach() for name, p in model.named_parameters()}
        self._shapes = {name: p.shape for name, p in named.items()}
        self._wide = [n for n, p in named.items() if p.dim() > 1 and p.numel() >= _SMALL]
        self._narrow = [name for name in named if name not in self._wide]
        # Of one row, since what has one dimension travels dense.
        self.wide = nn.Parameter(_joined(named, self._wide)[None])
        self.rest = nn.Parameter(_joined(named, self._narrow))
        for name in named:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, None)
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        parts = {**self._cut(self.wide[0], self._wide), **self._cut(self.rest, self._narrow)}
        output: Tensor = functional_call(self.model, parts, (inputs,))
        return output

    def _cut(self, vector: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        # One split, since the gradient of each of many slices would be as long as the vector.
        pieces = vector.split([self._shapes[name].numel() for name in names])
        pairs = zip(names, pieces, strict=True)
        return {name: piece.view(self._shapes[name]) for name, piece in pairs}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    first = next(iter(tensors.values()))
    return torch.cat([first.new_empty(0), *(tensors[name].flatten() for name in names)])
