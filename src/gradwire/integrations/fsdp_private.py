"""Access to FSDP2 internals: every private name of torch that we rely on is in this file.

| torch | offers |
|---|---|
| 2.6 | no hook at all |
| 2.7 | `set_all_reduce_hook` |
| 2.8 | and `set_gradient_divide_factor` |
| 2.9 | and `set_custom_reduce_scatter`, `set_custom_all_gather` |
| 2.12 | several groups of parameters in a unit (a mesh by parameter), which take no hooks |
| 2.13 | and `set_reduce_scatter_unused_params` |
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from gradwire.errors import ConfigError
from gradwire.integrations.parameters import COMPILED

T = TypeVar("T")

Sharded: TypeAlias = Any
"""An FSDPModule, whose import would take half as long as that of torch itself."""

SINCE = {
    "set_all_reduce_hook": "2.7",
    "set_custom_reduce_scatter": "2.9",
    "set_custom_all_gather": "2.9",
}


def check_version(setter: str, version: str = torch.__version__) -> None:
    """Raises ConfigError if this torch has no such hook."""
    if TorchVersion(version) < SINCE[setter]:
        raise ConfigError(f"FSDP2's {setter} needs torch {SINCE[setter]} or newer, got {version}")


class ReduceScatter(Protocol):
    """The argument of `set_custom_reduce_scatter`, as FSDP2 calls it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None: ...


class AllGather(Protocol):
    """The argument of `set_custom_all_gather`, as FSDP2 calls it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class Unit(NamedTuple):
    """A module that `fully_shard` was called on, and the parameters that it reduces together."""

    module: Sharded
    names: list[str]
    parameters: list[nn.Parameter]
    """The shards, as the optimiser sees them."""
    shapes: list[torch.Size]
    """Shapes of the shards, with the padding that all but the last of them may have."""
    dtype: torch.dtype
    """The type in which gradients are reduced."""

    @property
    def title(self) -> str:
        return f"the unit of {self.names[0]}"

    def _group(self) -> Any:
        [group] = _groups(self.module)
        return group

    def shard_group(self) -> dist.ProcessGroup:
        return _shard_group(self._group())

    def reduces_replicas(self) -> bool:
        """Returns whether torch itself reduces over replicas, which happens before any hook."""
        return bool(self._group()._is_hsdp)

    def divide_factor(self) -> float | None:
        """Returns the divisor that the user set in place of the number of ranks."""
        factor: float | None = getattr(self._group(), "gradient_divide_factor", None)
        return factor

    def requires_all_reduce(self) -> bool:
        """Returns what `set_requires_all_reduce` was called with; torch ignores it for hooks."""
        return bool(self._group().all_reduce_grads)

    def hooked_parameters(self) -> list[str]:
        """Returns the parameters with a hook that FSDP2 calls when it has added to a gradient."""
        pairs = zip(self.names, self.parameters, strict=True)
        return [name for name, p in pairs if getattr(p, "_post_accumulate_grad_hooks", None)]

    def current_hook(self, setter: str) -> str | None:
        """Returns the name of the hook that is already set, if any."""
        if setter == "set_all_reduce_hook":
            hook = self._group()._all_reduce_hook
            return None if hook is None else getattr(hook, "__qualname__", repr(hook))
        name = type(self._group()._reduce_scatter_comm).__name__
        return None if name == "DefaultReduceScatter" else name

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        self._group()._all_reduce_hook = hook

    def set_reduce_scatter(self, comm: ReduceScatter) -> ReduceScatter:
        """Sets the reduce-scatter and returns the previous one."""
        before: ReduceScatter = self._group()._reduce_scatter_comm
        self.module.set_custom_reduce_scatter(comm)
        return before


class GatheredUnit(NamedTuple):
    """A module that `fully_shard` was called on, and all parameters that it gathers together."""

    module: Sharded
    names: list[str]
    shapes: list[torch.Size]
    """Shapes of the shards, with their padding; frozen parameters are gathered too."""
    dtype: torch.dtype
    """The type in which weights are gathered."""
    device: torch.device

    @property
    def title(self) -> str:
        return f"the unit of {self.names[0]}"

    def _group(self) -> Any:
        [group] = _groups(self.module)
        return group

    def shard_group(self) -> dist.ProcessGroup:
        return _shard_group(self._group())

    def current_hook(self) -> str | None:
        """Returns the name of the all-gather that is already set, if any."""
        name = type(self._group()._all_gather_comm).__name__
        return None if name == "DefaultAllGather" else name

    def all_gather(self) -> AllGather:
        """Returns the current all-gather."""
        current: AllGather = self._group()._all_gather_comm
        return current

    def set_all_gather(self, comm: AllGather) -> None:
        self.module.set_custom_all_gather(comm)


def _shard_group(group: Any) -> dist.ProcessGroup:
    found: dist.ProcessGroup = group.mesh_info.shard_process_group
    return found


def _groups(module: Sharded) -> list[Any]:
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    one = state._fsdp_param_group if several is None else None
    return several if several is not None else [one] if one is not None else []


def is_sharded(model: nn.Module) -> bool:
    """Returns whether some part of the model went through `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def units_of(model: nn.Module) -> list[Unit]:
    """Returns the units of a model that have trainable parameters."""
    return _made_of_units(model, _unit)


def gathered_units_of(model: nn.Module) -> list[GatheredUnit]:
    """Returns the units of a model whose weights are gathered, also those that are frozen."""
    return _made_of_units(model, _gathered_unit)


def _made_of_units(
    model: nn.Module, make: Callable[[Sharded, dict[nn.Module, str]], T | None]
) -> list[T]:
    """Returns what `make` makes of the modules that `fully_shard` was called on, if anything."""
    from torch.distributed.fsdp import FSDPModule

    paths = {module: path for path, module in model.named_modules()}
    made = [make(module, paths) for module in model.modules() if isinstance(module, FSDPModule)]
    found = [unit for unit in made if unit is not None]
    if not found:
        raise _not_sharded(model)
    return found


def _not_sharded(model: nn.Module) -> ConfigError:
    from torch.distributed.fsdp import FullyShardedDataParallel

    text = "attach_fsdp: no part of the model went through fully_shard"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        text += ", but through FullyShardedDataParallel (FSDP1), whose hooks cannot compress"
    return ConfigError(text)


def _gathered_unit(module: Sharded, paths: dict[nn.Module, str]) -> GatheredUnit | None:
    shards = [shard for group in _groups_with_hooks(module) for shard in group.fsdp_params]
    if not shards:
        return None
    names = _names(shards, paths)
    dtypes = {}
    for name, shard in zip(names, shards, strict=True):
        if hasattr(shard._sharded_local_tensor, "fsdp_pre_all_gather"):
            kind = type(shard._sharded_local_tensor).__name__
            raise ConfigError(
                f"attach_fsdp: {name} is a {kind}, which encodes its own all-gather; leave weights "
                "out"
            )
        own: torch.dtype = shard.sharded_param.dtype
        cast = shard.mp_policy.param_dtype if own.is_floating_point else None
        dtypes[name] = cast or own
    unit = GatheredUnit(
        module,
        names,
        [shard.padded_sharded_param_size for shard in shards],
        dtypes[names[0]],
        shards[0].device,
    )
    for name, dtype in dtypes.items():
        if dtype != unit.dtype:
            raise ConfigError(
                f"attach_fsdp: {unit.title} gathers {unit.dtype}, but {name} as {dtype}, so that "
                "FSDP2 hands over bytes, which weights= cannot round; call fully_shard on their "
                "modules apart, or set one param_dtype in its MixedPrecisionPolicy"
            )
    return unit


def _groups_with_hooks(module: Sharded) -> list[Any]:
    """Returns the groups of parameters of a unit: one, or none if it has no parameter."""
    groups = _groups(module)
    if len(groups) > 1:
        raise ConfigError("attach_fsdp: a unit has several meshes, for which FSDP2 has no hooks")
    return groups


def _names(shards: list[Any], paths: dict[nn.Module, str]) -> list[str]:
    infos = [shard._module_info for shard in shards]
    return [f"{paths[i.module]}.{i.param_name}".lstrip(".").replace(COMPILED, "") for i in infos]


def _unit(module: Sharded, paths: dict[nn.Module, str]) -> Unit | None:
    groups = _groups_with_hooks(module)
    shards = [s for group in groups for s in group.fsdp_params if s.sharded_param.requires_grad]
    if not shards:
        return None
    policy = groups[0].mp_policy
    return Unit(
        module,
        _names(shards, paths),
        [shard.sharded_param for shard in shards],
        [shard.padded_sharded_param_size for shard in shards],
        policy.reduce_dtype or policy.param_dtype or shards[0].sharded_param.dtype,
    )


def scale_of(op: Any, size: int) -> float:
    """Returns the factor from a mean over `size` ranks to the result of `op`."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(size)
    if op == dist.ReduceOp.PREMUL_SUM:
        # torch exposes the factor only in the pickled state.
        return float(op.__getstate__()[1]) * size
    raise ConfigError(f"a reduce-scatter by {op} is no mean; expected AVG, SUM or PREMUL_SUM")
