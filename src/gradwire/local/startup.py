"""Startup of a local method: which parameters it trains, and whether all workers start equal.

Also broadcasts and averages the models of all workers.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.consistency import (
    compare_settings,
    describe_differences,
    digests_collective,
    settings_collective,
)
from gradwire.errors import ConfigError, PeerError
from gradwire.wire.layout import join, split


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Returns the optimiser's trainable parameters by name, in the model's order."""
    if isinstance(model, DDP):
        raise ConfigError(
            "the model is a DistributedDataParallel, which communicates at every step; give its "
            ".module"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "expected a model and its optimiser, in this order, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    named = dict(model.named_parameters())
    known, trained = {id(p) for p in named.values()}, {id(p) for p in _trainable(optimizer)}
    if trained - known:
        count = len(trained - known)
        raise ConfigError(f"the optimiser has {count} parameters that are not in the model")
    found = {name: p for name, p in named.items() if id(p) in trained}
    if not found:
        raise ConfigError("the optimiser has no trainable parameter")
    return found


def check_unchanged(
    model: nn.Module, optimizer: Optimizer, start: Mapping[str, nn.Parameter]
) -> None:
    """Raises ConfigError if a parameter was added, frozen or unfrozen since the start."""
    current = {id(p) for p in _trainable(optimizer)}
    initial = {id(p): name for name, p in start.items()}
    if current == initial.keys():
        return
    gone = sorted(initial[key] for key in initial.keys() - current)
    names = {id(p): name for name, p in model.named_parameters()}
    new = sorted(names.get(key, "one outside the model") for key in current - initial.keys())
    what = [f"frozen or removed: {gone}"] * bool(gone) + [f"added or unfrozen: {new}"] * bool(new)
    raise ConfigError(
        f"parameters have changed since the start ({'; '.join(what)}); end this context on all "
        "workers and begin another"
    )


def _trainable(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.requires_grad)


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of `model.state_dict()`: all parameters and the persistent buffers.

    Complex ones are viewed as pairs of real numbers; all share their memory with the model.
    """
    tensors = {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def check_settings(
    size: int, device: torch.device, settings: Mapping[str, object]
) -> CollectiveProgram[None]:
    """Raises ConfigError on all workers unless all have the same settings."""
    compare_settings((yield settings_collective(size, device, settings)))


def check_tensors(tensors: Mapping[str, Tensor], size: int) -> CollectiveProgram[None]:
    """Raises PeerError on all workers, naming parameters and ranks, unless tensors are equal."""
    if not tensors:
        return
    lines = describe_differences((yield digests_collective(tensors, size)), tensors)
    if lines:
        text = "models differ at the start (load the same one, or give broadcast=True):"
        raise PeerError("\n".join([text, *lines]))


def broadcast_tensors(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Copies the tensors of worker 0 to all workers."""
    for tensor in tensors.values():
        data = tensor.detach()
        [received] = yield Collective(
            "broadcast", [data.clone().contiguous().view(-1).view(torch.uint8)]
        )
        data.copy_(received.view(data.dtype).view(data.shape))


def average_tensors(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Replaces the tensors by their mean over all workers."""
    own = [tensor.detach() for tensor in tensors.values()]
    [mean] = yield Collective("mean", [join(own).clone()])
    for tensor, its_mean in zip(own, split(mean, own), strict=True):
        tensor.copy_(its_mean)
