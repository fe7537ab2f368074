"""Looks up trained parameters, their names, and the process group that averages their gradients."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.comm.groups import check_member, group_of_mesh
from gradwire.errors import ConfigError

COMPILED = "_orig_mod."
"""The prefix that torch.compile puts into the names of a model's parameters."""


def names_of(model: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, str]:
    """Returns the names of trained parameters, in order; without the prefix of torch.compile."""
    if isinstance(getattr(model, COMPILED.rstrip("."), model), DDP):
        raise ConfigError("DDP averages gradients itself; use gradwire.attach")
    if isinstance(model, nn.Module):
        check_dense(model)
        model = model.named_parameters()
    if not isinstance(model, Iterable):
        raise ConfigError(f"expected a module or parameters with their names, got {model!r}")
    found: dict[nn.Parameter, str] = {}
    for pair in model:
        if not _is_named(pair):
            raise ConfigError(
                "parameters have no names; pass the model or model.named_parameters(), got "
                f"{type(pair).__name__}"
            )
        name, parameter = pair[0].replace(COMPILED, ""), pair[1]
        if parameter.requires_grad:
            found[parameter] = name
    _check(found)
    return found


def _is_named(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], Tensor)


def _check(names: dict[nn.Parameter, str]) -> None:
    if not names:
        raise ConfigError("there is no parameter to train")
    if len(set(names.values())) < len(names):
        twice = sorted({n for n in names.values() if list(names.values()).count(n) > 1})
        raise ConfigError(f"parameters must have unique names, got several {twice}")
    for parameter, name in names.items():
        # By name, since importing the class would slow down the import of gradwire.
        if type(parameter).__name__ == "DTensor":
            raise ConfigError(f"{name} is sharded; use gradwire.attach_fsdp for FSDP2")
    devices = sorted({str(parameter.device) for parameter in names})
    if len(devices) > 1:
        raise ConfigError(f"parameters must be on one device, got {devices}")


def check_dense(model: nn.Module) -> None:
    """Raises ConfigError if a module produces sparse gradients."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"attach: {path or 'the model'} has sparse=True; use dense gradients")


def group_of(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the group of all ranks, a given group, or that of a mesh of one dimension."""
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call torch.distributed.init_process_group")
    if isinstance(given, DeviceMesh):
        return group_of_mesh(given)
    world = dist.group.WORLD
    assert world is not None
    if given is None:
        return world
    check_member(given)
    return given
