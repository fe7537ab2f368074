"""FSDP2 and HSDP: compressed reduce-scatter, or compressed mean over replicas of a shard."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base import Compressor, Memory
from gradwire.comm.base import drive
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.dense_allreduce import own_row, start_mean
from gradwire.integrations.fsdp_private import (
    ReduceScatter,
    Unit,
    check_version,
    scale_of,
    units_of,
)
from gradwire.integrations.handle import Handle, Options, Planner, Wanted, at_end_of_backward
from gradwire.integrations.parameters import check_dense, group_of
from gradwire.integrations.reduce_scatter import scatter_plan


class Shards(Handle):
    """An FSDP2 model whose gradients go through Gradwire, until `detach`."""

    def __init__(
        self,
        units: list[Unit],
        group: dist.ProcessGroup,
        over_replicas: bool,
        wanted: Wanted,
        options: Options,
    ) -> None:
        planner: Planner = make_plan if over_replicas else scatter_plan
        rows = 1 if over_replicas else group.size()
        tensors = {name: form for unit in units for name, form in _forms(unit, rows).items()}
        names = {p: n for unit in units for p, n in zip(unit.parameters, unit.names, strict=True)}
        Handle.__init__(self, group, tensors, names, planner, wanted, options)
        self._units = units
        self._seen: set[str] = set()
        self._before: list[tuple[Unit, ReduceScatter]] = []
        self._attached = True
        for unit in units:
            if over_replicas:
                unit.set_all_reduce_hook(partial(self._mean, unit))
            else:
                self._before.append((unit, unit.set_reduce_scatter(_Slot(self, unit))))

    def _close(self) -> None:
        self._attached = False
        for unit, comm in self._before:
            unit.set_reduce_scatter(comm)
        for unit in () if self._before else self._units:
            unit.set_all_reduce_hook(None)

    def _is_attached(self) -> bool:
        return self._attached

    def _mean(self, unit: Unit, flat: Tensor) -> None:
        """Makes of a unit's flat shard its mean over replicas, or their sum if FSDP2 divides."""
        pieces = _split(unit, flat)
        if self._is_straight():
            self._pass_by(unit, flat)
            start_mean(self._comm, [flat])()
        else:
            self._talk(unit, [p.view(s) for p, s in zip(pieces, unit.shapes, strict=True)])
        if unit.divide_factor() is not None:
            flat.mul_(self._comm.size)

    def _scatter(self, unit: Unit, out: Tensor, flat: Tensor, op: dist.ReduceOp) -> None:
        """Writes the own shard of the mean of `flat` into `out`, scaled as `op` asks."""
        table = flat.view(self._comm.size, -1)  # [ranks, all of the unit's shards]
        pieces, scale = _split(unit, table), scale_of(op, self._comm.size)
        if self._lanes.is_straight():
            self._pass_by(unit, flat)
            drive(own_row(table, out, scale), self._comm)
            return
        wholes = [piece.contiguous() for piece in pieces]
        lanes = self._lanes.tensors
        forms = [lanes[name].shape for name in unit.names]
        self._talk(unit, [w.view(form) for w, form in zip(wholes, forms, strict=True)])
        for mine, whole in zip(_split(unit, out), wholes, strict=True):
            mine.copy_(whole[self._comm.rank])
            # An alarm makes the whole's first entry NaN, and all ranks must see it.
            mine[:1] += whole.view(-1)[:1] * 0
        out.mul_(scale)

    def _talk(self, unit: Unit, gradients: list[Tensor]) -> None:
        self._take_up(unit)
        drive(self._lanes.talk(unit.names, gradients), self._comm)

    def _pass_by(self, unit: Unit, flat: Tensor) -> None:
        self._take_up(unit)
        self._lanes.pass_by(unit.names, flat.nbytes)

    def _take_up(self, unit: Unit) -> None:
        """A unit's place in the step, which ends with the backward pass."""
        if unit.names[0] in self._seen:
            # Reduced twice in one backward pass: the first time was a step of its own.
            self._finish()
        self._seen.add(unit.names[0])
        if len(self._seen) == 1:
            at_end_of_backward(lambda: at_end_of_backward(self._finish))

    def _finish(self) -> None:
        if self._seen:
            self._seen.clear()
            self._lanes.finish()
            self._end_step()


class _Slot:
    """A unit's place in FSDP2 where it asks for a reduce-scatter."""

    def __init__(self, shards: Shards, unit: Unit) -> None:
        self._shards = shards
        self._unit = unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self._shards._scatter(self._unit, output_tensor, input_tensor, op)


def _forms(unit: Unit, rows: int) -> dict[str, Tensor]:
    """What gradients look like when they are exchanged: shards, or so many of them in a row."""
    device = unit.parameters[0].device
    one = torch.empty((), dtype=unit.dtype, device=device)
    return {
        name: one.expand(rows * shape[0], *shape[1:])
        for name, shape in zip(unit.names, unit.shapes, strict=True)
    }


def _split(unit: Unit, flat: Tensor) -> list[Tensor]:
    """The pieces of a unit's parameters in the last dimension of its flat buffer."""
    lengths = [shape.numel() for shape in unit.shapes]
    if sum(lengths) != flat.shape[-1]:
        raise ConfigError(
            f"{unit.title} reduces {flat.shape[-1]} entries a rank instead of {sum(lengths)}: some "
            "of its parameters have no gradient; use them all, freeze them before attach_fsdp, or "
            "call set_reduce_scatter_unused_params(True) (torch 2.13)"
        )
    return list(flat.split(lengths, dim=-1))


def attach_fsdp(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    memory: Memory | str | None = None,
    exchange: str = "auto",
    seed: int = 0,
    nan_policy: NanPolicy = "propagate",
    checksum: bool = False,
    controller: Controller | str | None = None,
) -> Shards:
    """Compresses the gradients of a model after `fully_shard`, from the next backward pass on.

    Without `replicas` the reduce-scatter over the shard mesh: a residual then has the size of the
    whole gradient. With `replicas`, a group or mesh across which shards are copies of each other,
    the mean over these: give `fully_shard` the shard mesh only, since with both FSDP2 reduces over
    replicas by itself. Lanes are parameters, as with DDP.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach_fsdp: expected a module, got {type(model).__name__}")
    check_dense(model)
    units = units_of(model)
    setter = "set_custom_reduce_scatter" if replicas is None else "set_all_reduce_hook"
    check_version(setter)
    group = _shard_group(units) if replicas is None else _replica_group(units, replicas)
    for unit in units:
        if occupant := unit.occupant(setter):
            raise ConfigError(f"attach_fsdp: {setter} of {unit.title} is taken by {occupant}")
    options = Options(seed, nan_policy, 0, checksum, find_controller(controller))
    return Shards(units, group, replicas is not None, Wanted(compressor, memory, exchange), options)


def _shard_group(units: list[Unit]) -> dist.ProcessGroup:
    groups = {unit.shard_group() for unit in units}
    if len(groups) > 1:
        raise ConfigError("attach_fsdp: all units must be sharded over the same mesh")
    return groups.pop()


def _replica_group(
    units: list[Unit], replicas: dist.ProcessGroup | DeviceMesh
) -> dist.ProcessGroup:
    group = group_of(replicas)
    if any(unit.reduces_replicas() for unit in units):
        raise ConfigError(
            "attach_fsdp: fully_shard got a mesh with replicas, over which it reduces by itself "
            "before any hook; give it the shard mesh only, like mesh['shard']"
        )
    across = set(dist.get_process_group_ranks(group))
    shared = across & set(dist.get_process_group_ranks(_shard_group(units)))
    if shared != {dist.get_rank()}:
        raise ConfigError(
            f"attach_fsdp: replicas {sorted(across)} and shards share ranks {sorted(shared)}; "
            f"expected rank {dist.get_rank()} alone"
        )
    return group
