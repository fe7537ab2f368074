"""FSDP2 and HSDP: compressed reduce-scatter, or mean over replicas; and all-gather of weights."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comm.base import run_program
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.backward_pass import BackwardPass, at_end_of_backward
from gradwire.integrations.dense_allreduce import reduce_scatter_mean, start_mean
from gradwire.integrations.fsdp_private import (
    GatheredUnit,
    ReduceScatter,
    Unit,
    check_version,
    gathered_units_of,
    scale_of,
    units_of,
)
from gradwire.integrations.handle import Handle, Planner
from gradwire.integrations.parameters import check_dense, group_of
from gradwire.integrations.reduce_scatter import reduce_scatter_plan
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.integrations.weight_gather import WeightGather, weights_plan
from gradwire.policies import MethodSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Shards(Handle):
    """Handle of an FSDP2 model whose gradients, and weights, are compressed, until `detach`."""

    def __init__(
        self,
        units: list[Unit],
        group: dist.ProcessGroup,
        over_replicas: bool,
        settings: Settings,
        weights: tuple[MethodSpec, list[GatheredUnit]] | None = None,
    ) -> None:
        planner: Planner = make_plan if over_replicas else reduce_scatter_plan
        rows = 1 if over_replicas else group.size()
        tensors = {
            name: form for unit in units for name, form in _gradient_forms(unit, rows).items()
        }
        names = {p: n for unit in units for p, n in zip(unit.parameters, unit.names, strict=True)}
        shard_group = units[0].shard_group()
        plan = None if weights is None else weights_plan(*weights, shard_group.size())
        identity = {"weights": None if plan is None else {**plan.identity(), **plan.code_digests()}}
        Handle.__init__(self, group, tensors, names, planner, settings, identity=identity)
        self._weights: WeightGather | None = None
        if weights is not None and plan is not None:
            comm = ProcessGroupComm(shard_group, self._comm.meter, checksum=settings.checksum)
            self._weights = WeightGather(weights[1], plan, comm, self._engine)
            self._other_leg = self._weights
        self._units = units
        self._seen: set[str] = set()
        self._pass = BackwardPass()
        # Sums of micro-batches that replicas have yet to exchange, by the unit's first parameter.
        self._partial_sums: dict[str, Tensor] = {}
        self._before: list[tuple[Unit, ReduceScatter]] = []
        self._attached = True
        for unit in units:
            if over_replicas:
                unit.set_all_reduce_hook(partial(self._mean, unit))
            else:
                self._before.append((unit, unit.set_reduce_scatter(_ReduceScatterHook(self, unit))))
        if self._weights is not None:
            self._weights.attach()

    def _close(self) -> None:
        if self._partial_sums:
            raise ConfigError(
                f"detach: {len(self._partial_sums)} units hold sums of micro-batches that replicas "
                "have not exchanged; run the last one with set_requires_all_reduce(True) first"
            )
        self._attached = False
        for unit, comm in self._before:
            unit.set_reduce_scatter(comm)
        for unit in () if self._before else self._units:
            unit.set_all_reduce_hook(None)
        if self._weights is not None:
            self._weights.detach()

    def _is_attached(self) -> bool:
        return self._attached

    def _is_in_backward(self) -> bool:
        return self._pass.is_running()

    def _count_framework_passes(self) -> None:
        pass

    def _prepare_own_exchange(self, requester: str) -> Callable[[], None]:
        return lambda: None

    def _complete_step(self) -> None:
        if self._pass.has_begun:
            self._finish()

    def _mean(self, unit: Unit, flat: Tensor) -> None:
        """Replaces a unit's flat shard by its mean over replicas, or the sum if FSDP2 divides.

        While `set_requires_all_reduce` is False, it is added to a partial sum instead, as FSDP2
        does with replicas of its own, and FSDP2 is left with zeros.
        """
        pieces = _split(unit, flat)
        if not unit.requires_all_reduce():
            self._add_partial_sum(unit, flat)
            return
        if (partial_sum := self._partial_sums.pop(unit.names[0], None)) is not None:
            flat.add_(partial_sum)
        if self._is_plain_mean():
            self._count_dense(unit, flat)
            start_mean(self._comm, [flat])()
        else:
            self._exchange(unit, [p.view(s) for p, s in zip(pieces, unit.shapes, strict=True)])
        if unit.divide_factor() is not None:
            flat.mul_(self._comm.size)

    def _add_partial_sum(self, unit: Unit, flat: Tensor) -> None:
        """Moves a unit's flat shard into its partial sum."""
        if hooked := unit.hooked_parameters():
            raise ConfigError(
                f"{hooked[0]}: its hook after gradient accumulation would see zeros before the "
                "last micro-batch; use set_requires_gradient_sync, not set_requires_all_reduce"
            )
        name = unit.names[0]
        if name in self._partial_sums:
            self._partial_sums[name].add_(flat)
        else:
            self._partial_sums[name] = flat.clone()
        flat.zero_()

    def _scatter(self, unit: Unit, out: Tensor, flat: Tensor, op: dist.ReduceOp) -> None:
        """Writes this rank's shard of the mean of `flat` to `out`, scaled as `op` requires."""
        table = flat.view(self._comm.size, -1)  # [ranks, all of the unit's shards]
        pieces, scale = _split(unit, table), scale_of(op, self._comm.size)
        if self._engine.is_plain_mean():
            self._count_dense(unit, flat)
            run_program(reduce_scatter_mean(table, out, scale), self._comm)
            return
        wholes = [piece.contiguous() for piece in pieces]
        lanes = self._engine.tensors
        forms = [lanes[name].shape for name in unit.names]
        self._exchange(unit, [w.view(form) for w, form in zip(wholes, forms, strict=True)])
        for mine, whole in zip(_split(unit, out), wholes, strict=True):
            mine.copy_(whole[self._comm.rank])
            # The non-finite guard makes the whole's first entry NaN, and all ranks must see it.
            mine[:1] += whole.view(-1)[:1] * 0
        out.mul_(scale)

    def _exchange(self, unit: Unit, gradients: list[Tensor]) -> None:
        self._begin_unit(unit)
        run_program(self._engine.bucket_program(unit.names, gradients), self._comm)

    def _count_dense(self, unit: Unit, flat: Tensor) -> None:
        self._begin_unit(unit)
        self._engine.count_dense_bucket(unit.names, flat.nbytes)

    def _begin_unit(self, unit: Unit) -> None:
        """Counts a unit in the current step, which ends with the backward pass."""
        if unit.names[0] in self._seen:
            # A unit reduced twice in one backward pass: the first time was a step of its own.
            self._finish()
        self._seen.add(unit.names[0])
        self._pass.note_bucket()
        if len(self._seen) == 1:
            at_end_of_backward(lambda: at_end_of_backward(self._finish))

    def _finish(self) -> None:
        self._pass.end()
        if self._seen:
            self._seen.clear()
            self._passes += 1
            if self._weights is not None:
                self._weights.end_step()
            self._engine.end_step()
            self._end_step()


class _ReduceScatterHook:
    """Performs a unit's reduce-scatter when FSDP2 requests one."""

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


def _gradient_forms(unit: Unit, rows: int) -> dict[str, Tensor]:
    """Returns tensors of the shapes in which gradients are exchanged: `rows` stacked shards."""
    device = unit.parameters[0].device
    one = torch.empty((), dtype=unit.dtype, device=device)
    return {
        name: one.expand(rows * shape[0], *shape[1:])
        for name, shape in zip(unit.names, unit.shapes, strict=True)
    }


def _split(unit: Unit, flat: Tensor) -> list[Tensor]:
    """Splits the last dimension of a unit's flat buffer into the pieces of its parameters."""
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
    compressor: MethodSpec | Settings | None = None,
    *,
    gradients: MethodSpec | Settings | None = None,
    weights: MethodSpec | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    **options: "Unpack[Options]",
) -> Shards:
    """Compresses the gradients of a model after `fully_shard`, from the next backward pass on.

    `gradients` is another name of `compressor`. Without `replicas` it compresses the reduce-scatter
    over the shard mesh: a residual then has the size of the whole gradient. With `replicas`, a
    group or mesh whose ranks hold copies of the same shard, it compresses the mean over these: give
    `fully_shard` the shard mesh only, since with both FSDP2 reduces over replicas by itself. While
    `set_requires_all_reduce` is False, replicas add up the shards of micro-batches and exchange the
    sum after the last one. There is one lane per parameter, as with DDP.

    With `weights`, such as "int8", the all-gathers of parameters are compressed too, in forward and
    in backward, from the next forward pass on. Optimiser and checkpoints keep the weights in full
    precision; all ranks compute with the same decoded ones.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach_fsdp: expected a module, got {type(model).__name__}")
    check_dense(model)
    units = units_of(model)
    setter = "set_custom_reduce_scatter" if replicas is None else "set_all_reduce_hook"
    check_version(setter)
    group = _shard_group(units) if replicas is None else _replica_group(units, replicas)
    for unit in units:
        if current_hook := unit.current_hook(setter):
            raise ConfigError(f"attach_fsdp: {setter} of {unit.title} is taken by {current_hook}")
    settings = settings_of(_one_method(compressor, gradients), options)
    settings.refuse("attach_fsdp", "check_every", "least_bytes", "chunk_bytes")
    settings.refuse_auto("attach_fsdp")
    both = None if weights is None else (weights, _gathered_units(model))
    return Shards(units, group, replicas is not None, settings, both)


def _one_method(
    compressor: MethodSpec | Settings | None, gradients: MethodSpec | Settings | None
) -> MethodSpec | Settings:
    """Returns the method of gradients, which was given once, under one of two names."""
    if compressor is not None and gradients is not None:
        raise ConfigError(
            "attach_fsdp: gradients= is another name of the method that was given first; give one "
            f"of them, got {compressor!r} and {gradients!r}"
        )
    method = gradients if compressor is None else compressor
    if method is None:
        raise ConfigError("attach_fsdp: no method for gradients; 'none' sends them as they are")
    return method


def _gathered_units(model: nn.Module) -> list[GatheredUnit]:
    """Returns the units whose all-gather is free for a hook of ours."""
    check_version("set_custom_all_gather")
    units = gathered_units_of(model)
    for unit in units:
        if current_hook := unit.current_hook():
            raise ConfigError(
                f"attach_fsdp: set_custom_all_gather of {unit.title} is taken by {current_hook}"
            )
    if len({unit.shard_group() for unit in units}) > 1:
        raise ConfigError("attach_fsdp: all units must be sharded over the same mesh")
    return units


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
    replica_ranks = set(dist.get_process_group_ranks(group))
    shared = replica_ranks & set(dist.get_process_group_ranks(_shard_group(units)))
    if shared != {dist.get_rank()}:
        raise ConfigError(
            f"attach_fsdp: replicas {sorted(replica_ranks)} and shards share ranks "
            f"{sorted(shared)}; expected rank {dist.get_rank()} alone: replicas are a dimension of "
            "their own, like init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate', "
            "'shard'))['replicate']"
        )
    return group
