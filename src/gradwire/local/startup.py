"""Startup of a local method: which parameters it trains, and whether all workers start equal.

Also broadcasts and averages the models of all workers.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.consistency import compare, differences, digests_call, settings_call
from gradwire.errors import ConfigError, PeerError
from gradwire.wire.layout import join, split


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


def held(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state: parameters, frozen ones too, and buffers that are saved.

    Complex ones as pairs of real numbers; all share their memory with the model.
    """
    tensors = {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def agreed(
    size: int, device: torch.device, settings: Mapping[str, object]
) -> CollectiveProgram[None]:
    """Raises ConfigError on all workers unless all have the same settings."""
    compare((yield settings_call(size, device, settings)))


def checked_same(tensors: Mapping[str, Tensor], size: int) -> CollectiveProgram[None]:
    """Raises PeerError on all workers, naming parameters and ranks, unless all have the same."""
    if not tensors:
        return
    lines = differences((yield digests_call(tensors, size)), tensors)
    if lines:
        text = "models differ at the start (load the same one, or give broadcast=True):"
        raise PeerError("\n".join([text, *lines]))


def copied_from_first(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Gives all workers the tensors of worker 0."""
    for tensor in tensors.values():
        data = tensor.detach()
        [told] = yield Collective(
            "broadcast", [data.clone().contiguous().view(-1).view(torch.uint8)]
        )
        data.copy_(told.view(data.dtype).view(data.shape))


def averaged(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Replaces the tensors by their mean over all workers."""
    own = [tensor.detach() for tensor in tensors.values()]
    [mean] = yield Collective("mean", [join(own).clone()])
    for tensor, its_mean in zip(own, split(mean, own), strict=True):
        tensor.copy_(its_mean)
