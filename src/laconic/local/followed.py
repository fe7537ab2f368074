"""Which parameters a local method follows, and whether they are still the ones it started with."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from laconic.errors import ConfigError


def followed(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The trainable parameters of the optimiser by their names in the model, in its order."""
    if isinstance(model, DDP):
        raise ConfigError(
            "the model is a DistributedDataParallel, which talks at every step; give its .module"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "expected a model and its optimiser, in this order, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    named = dict(model.named_parameters())
    known, ours = {id(p) for p in named.values()}, {id(p) for p in _trainable(optimizer)}
    if ours - known:
        raise ConfigError(f"the optimiser has {len(ours - known)} parameters that no model has")
    found = {name: p for name, p in named.items() if id(p) in ours}
    if not found:
        raise ConfigError("the optimiser has no trainable parameter")
    return found


def check_unchanged(
    model: nn.Module, optimizer: Optimizer, start: Mapping[str, nn.Parameter]
) -> None:
    """Raises ConfigError when a parameter was added, frozen or unfrozen since the start."""
    now = {id(p) for p in _trainable(optimizer)}
    then = {id(p): name for name, p in start.items()}
    if now == then.keys():
        return
    gone = sorted(then[key] for key in then.keys() - now)
    names = {id(p): name for name, p in model.named_parameters()}
    new = sorted(names.get(key, "one that the model has not") for key in now - then.keys())
    what = [f"frozen or removed: {gone}"] * bool(gone) + [f"added or unfrozen: {new}"] * bool(new)
    raise ConfigError(
        f"parameters have changed since the start ({'; '.join(what)}); end this context on all "
        "workers and begin another"
    )


def _trainable(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.requires_grad)
