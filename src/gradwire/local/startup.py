"""Startup of a local method: which parameters it trains, and whether all workers start equal.

Also broadcasts and averages the models of all workers.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
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

_MOST_NAMES = 3
"""Number of parameters that an error names."""


def trained_parameters(
    method: str, model: nn.Module, optimizer: Optimizer
) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters by name, in the model's order.

    Raises ConfigError unless model and optimiser have the same ones, none of them sharded.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "expected a model and its optimiser, in this order, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    _check_not_sharded(method, model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    covered = {id(p): p for p in _trainable(optimizer)}
    known = {id(p) for p in trainable.values()}
    outside = [f"one of shape {tuple(p.shape)}" for key, p in covered.items() if key not in known]
    if outside:
        raise ConfigError(
            f"{method}: {len(outside)} trainable parameters of the optimiser are not in the "
            f"model: {_first(outside)}; pass the model that has them"
        )
    missing = [name for name, p in trainable.items() if id(p) not in covered]
    if missing:
        raise ConfigError(
            f"{method}: {len(missing)} trainable parameters of the model are not in the "
            f"optimiser: {_first(missing)}; they would differ between workers. Pass an optimiser "
            "that covers them, or freeze them with requires_grad_(False)"
        )
    if not trainable:
        raise ConfigError(f"{method}: the model has no trainable parameter")
    return trainable


def _check_not_sharded(method: str, model: nn.Module) -> None:
    """Raises ConfigError for DTensors, and for FSDP, which may show plain tensors for a while."""
    # Importing torch's modules takes half a second, and without them no model can be sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = sys.modules.get("torch.distributed.tensor")
    rule = "local methods do not support sharded parameters yet"
    for path, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ConfigError(
                f"{method}: {path or 'the model'} is a FullyShardedDataParallel; {rule}"
            )
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ConfigError(
                f"{method}: {path or 'the model'} is sharded by fully_shard (FSDP2), whose "
                f"parameters have type DTensor; {rule}"
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = [n for n, t in tensors if sharded is not None and isinstance(t, sharded.DTensor)]
    if found:
        raise ConfigError(
            f"{method}: {len(found)} tensors of the model have type DTensor (FSDP2 or tensor "
            f"parallelism): {_first(found)}; {rule}"
        )


def check_unchanged(
    method: str, model: nn.Module, optimizer: Optimizer, start: Mapping[str, nn.Parameter]
) -> None:
    """Raises ConfigError if the optimiser's trainable parameters have changed since the start."""
    current = {id(p) for p in _trainable(optimizer)}
    initial = {id(p): name for name, p in start.items()}
    if current == initial.keys():
        return
    gone = sorted(initial[key] for key in initial.keys() - current)
    names = {id(p): name for name, p in model.named_parameters()}
    new = sorted(names.get(key, "one outside the model") for key in current - initial.keys())
    what = [f"frozen or removed: {gone}"] * bool(gone) + [f"added or unfrozen: {new}"] * bool(new)
    raise _changed(method, "; ".join(what))


def check_covered(method: str, model: nn.Module, start: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError if the model has trainable parameters that it had not at the start."""
    known = {id(p) for p in start.values()}
    if all(id(p) in known for p in model.parameters() if p.requires_grad):
        return
    named = model.named_parameters()
    new = [name for name, p in named if p.requires_grad and id(p) not in known]
    raise _changed(method, f"trainable but not in the optimiser: {_first(new)}")


def _changed(method: str, what: str) -> ConfigError:
    return ConfigError(
        f"{method}: parameters have changed since the start ({what}); end this context on all "
        "workers and begin another"
    )


def _first(names: Sequence[str]) -> str:
    """Returns a text with the first names and the number of the others."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


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
