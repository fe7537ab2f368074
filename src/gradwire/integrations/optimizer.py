"""Training loops without DDP: averages gradients after backward, or inside an optimizer's step."""

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.auto.auto import find_auto
from gradwire.errors import ConfigError
from gradwire.integrations.handle import Handle
from gradwire.integrations.parameters import names_of
from gradwire.integrations.reducer import Reducer
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

# A reducer refers to parameters but not to the model, so it is collected with the model.
_reducers: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Reducer]] = WeakKeyDictionary()


def reduce_gradients(
    model: nn.Module,
    compressor: MethodSpec | Settings,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    **options: "Unpack[Options]",
) -> Reducer:
    """Averages a model's gradients over all ranks: one line between backward and step.

    The first call makes the model's reducer, later ones reuse it. It is returned, for `stats()`
    and the like.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"reduce_gradients: expected a module, got {type(model).__name__}; for parameters with "
            "names make a gradwire.Reducer, and call its reduce()"
        )
    requested = settings_of(compressor, options), process_group
    if model not in _reducers or not _reducers[model][1]._is_attached():
        reducer = Reducer(model, requested[0], process_group=process_group)
        _reducers[model] = (requested, reducer)
    before, reducer = _reducers[model]
    if before != requested:
        raise ConfigError(
            f"reduce_gradients: this model's reducer was made with {before}, got {requested}; use "
            "the reducer's switch"
        )
    reducer.reduce()
    return reducer


def wrap_optimizer(
    optimizer: AnyOptimizer,
    compressor: MethodSpec | Settings,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> AnyOptimizer:
    """Makes an optimiser average its gradients over all ranks before each step, and returns it.

    It is the same object, with a `Reducer` as its attribute `gradwire` until that is detached;
    `handle_of` returns it, too. Copies of the optimiser, pickled or not, are plain ones. Options
    are those of `Reducer`. Parameters need names: from the model, or from the optimiser if it was
    built with `model.named_parameters()`. A GradScaler checks gradients before the step, where
    ranks still differ: with one, call `reduce` on a reducer before `scaler.step` instead.
    """
    _check_optimizer(optimizer)
    if find_auto(compressor) is not None:
        options.setdefault("optimizer", optimizer)
    Reducer(_named(optimizer, model), compressor, **options).reduce_before(optimizer)
    return optimizer


def handle_of(optimizer: torch.optim.Optimizer) -> Handle:
    """Returns the handle of an optimiser of `gradwire.optim`, or one from `wrap_optimizer`."""
    handle = getattr(optimizer, "gradwire", None)
    if not isinstance(handle, Handle):
        raise ConfigError(
            f"handle_of: this {type(optimizer).__name__} is not wrapped, or was detached since; "
            "call wrap_optimizer first"
        )
    return handle


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"wrap_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if "gradwire" in vars(optimizer):
        raise ConfigError(
            "wrap_optimizer: this optimiser is wrapped already; switch or detach its handle, "
            "optimizer.gradwire"
        )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        # Such as Accelerate's, which does not call torch's constructor.
        raise ConfigError(
            f"wrap_optimizer: {type(optimizer).__name__} has no step hooks; wrap the optimiser "
            "inside it"
        )


def _named(
    optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """Returns the optimiser's parameters with their names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if model is None:
        names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
        if len(names) != len(parameters):
            raise ConfigError(
                "wrap_optimizer: the optimiser's parameters have no names; build it from "
                "model.named_parameters(), or pass model=model"
            )
        return list(zip(names, parameters, strict=True))
    known = names_of(model)
    unknown = [tuple(p.shape) for p in parameters if p.requires_grad and p not in known]
    if unknown:
        raise ConfigError(
            f"wrap_optimizer: parameters of shape {unknown} are not among the model's"
        )
    return [(known[p], p) for p in parameters if p in known]
