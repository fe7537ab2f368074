"""Training loops without DDP: averages gradients after backward, or inside an optimizer's step."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base import Compressor, Memory
from gradwire.control.base import Controller
from gradwire.errors import ConfigError
from gradwire.integrations.parameters import names_of
from gradwire.integrations.reducer import Reducer

# A reducer holds parameters but no model, so that it goes with the model.
_reducers: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Reducer]] = WeakKeyDictionary()


def reduce_gradients(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    memory: Memory | str | None = None,
    exchange: str = "auto",
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int = 0,
    controller: Controller | str | None = None,
) -> Reducer:
    """Averages a model's gradients over all ranks: one line between backward and step.

    The first call makes the model's reducer, later ones use it again; it is returned, to be asked
    for `stats()` and the like.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"reduce_gradients: expected a module, got {type(model).__name__}; for parameters with "
            "names make a gradwire.Reducer, and call its reduce()"
        )
    asked = (compressor, memory, exchange, process_group, seed, controller)
    if model not in _reducers or not _reducers[model][1]._is_attached():
        reducer = Reducer(
            model,
            compressor,
            memory=memory,
            exchange=exchange,
            process_group=process_group,
            seed=seed,
            controller=controller,
        )
        _reducers[model] = (asked, reducer)
    before, reducer = _reducers[model]
    if before != asked:
        raise ConfigError(
            f"reduce_gradients: this model's reducer was made with {before}, got {asked}; use the "
            "reducer's switch"
        )
    reducer.reduce()
    return reducer


def wrap_optimizer(
    optimizer: torch.optim.Optimizer,
    compressor: Compressor | str,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> Reducer:
    """Averages the gradients of an optimiser's parameters before each of its steps.

    Options are those of `Reducer`, which is returned. Parameters need names: from the model, or
    from the optimiser if it was built with `model.named_parameters()`. A GradScaler looks at
    gradients before the step, where ranks still differ: with one, call `reduce` on a reducer
    before `scaler.step` instead.
    """
    reducer = Reducer(_named(optimizer, model), compressor, **options)
    reducer.reduce_before(optimizer)
    return reducer


def _named(
    optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """The optimiser's parameters with their names."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"wrap_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if model is None:
        names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
        if len(names) != len(parameters):
            raise ConfigError(
                "wrap_optimizer: the optimiser's parameters have no names; build it from "
                "model.named_parameters(), or say model=model"
            )
        return list(zip(names, parameters, strict=True))
    known = names_of(model)
    strangers = [tuple(p.shape) for p in parameters if p.requires_grad and p not in known]
    if strangers:
        raise ConfigError(
            f"wrap_optimizer: parameters of shape {strangers} are not among the model's"
        )
    return [(known[p], p) for p in parameters if p in known]
