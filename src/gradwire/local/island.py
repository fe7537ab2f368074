"""Islands: groups of ranks that hold the model of one worker together, each of them a part.

A model that `fully_shard` or tensor parallelism has sharded inside an island has DTensors. Each
rank exchanges the local parts of these with the ranks at its place in all other islands, so an
island sends the model once.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeGuard
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm.base import Collective
from gradwire.comm.groups import lease_group
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import ConfigError, PeerError

Sharded: TypeAlias = Any
"""A DTensor, whose import takes half a second."""

MAX_ERROR_BYTES = 1 << 20
"""Upper bound of an error's text, which ranks of an island exchange."""


def is_sharded(tensor: object) -> TypeGuard[Sharded]:
    """Returns whether a tensor is a DTensor."""
    # Without the module no tensor can be one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, detached, which shares its memory.

    FSDP2 may move a shard to other memory at the first forward pass, so it is not to be kept.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def forms_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with the shapes, types and devices of all local parts, for an engine."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        part = local_part(parameter)
        # An engine keeps them, and needs no values.
        form = part.new_empty(()).expand(part.shape) if is_sharded(parameter) else parameter
        found[name] = form
    return found


class ShardedModel:
    """The sharded tensors of a model: none, or some that the ranks of an island hold together."""

    def __init__(self, method: str, model: nn.Module) -> None:
        """Raises ConfigError for `FullyShardedDataParallel`, whose parameters are flat."""
        self._method = method
        self._units: list[Any] = []
        # Without torch's module no part of the model can be sharded.
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for path, module in model.named_modules() if fsdp is not None else ():
            assert fsdp is not None
            if isinstance(module, fsdp.FullyShardedDataParallel):
                raise ConfigError(
                    f"{method}: {path or 'the model'} is a FullyShardedDataParallel (FSDP1), whose "
                    "parameters are flat; use fully_shard (FSDP2)"
                )
            if isinstance(module, fsdp.FSDPModule):
                self._units.append(module)
        self.reshard()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.tensors: dict[str, Sharded] = {name: t for name, t in tensors if is_sharded(t)}
        """All parameters and buffers that are DTensors."""

    def reshard(self) -> None:
        """Brings back the shards as parameters, so that the next forward pass gathers them anew.

        After a forward pass alone the outermost unit stays unsharded, with the old values.
        """
        for unit in self._units:
            unit.reshard()

    def check_workers(self, ranks: Sequence[int], takes_shards: bool) -> None:
        """Raises ConfigError if a method that synchronises these ranks cannot have the model."""
        first = next(iter(self.tensors))
        if not takes_shards:
            raise ConfigError(
                f"{self._method}: {first} is a DTensor, and this method takes whole models only, "
                "since its workers exchange at different times or with different others; use one "
                "that synchronises all of them, such as DiLoCo or QsparseLocalSGD"
            )
        if not ranks:
            raise ConfigError(
                f"{self._method}: {first} is a DTensor, whose ranks are real ones; give "
                "process_group the mesh or group between islands, not a worker of this process"
            )
        for name, tensor in self.tensors.items():
            self._check_inside(name, tensor, ranks)

    def _check_inside(self, name: str, tensor: Sharded, workers: Sequence[int]) -> None:
        for dim, placement in enumerate(tensor.placements):
            ranks = dist.get_process_group_ranks(tensor.device_mesh.get_group(dim))
            shared = sorted(set(ranks) & set(workers))
            what = "is sharded over" if placement.is_shard() else "has its gradients averaged over"
            if len(shared) > 1:
                raise ConfigError(
                    f"{self._method}: {name} {what} ranks {ranks} ({placement!r} on mesh dimension "
                    f"{dim}), but {shared} of them are workers that this method synchronises; give "
                    "fully_shard or tensor parallelism a mesh of one island, and process_group the "
                    "other dimension"
                )
            if placement.is_partial():
                raise ConfigError(f"{self._method}: {name} is a sum not reduced yet, {placement!r}")

    def layouts(self) -> dict[str, str]:
        """Returns texts about how tensors are distributed inside the island, for a comparison."""
        return {
            f"layout {name}": (
                f"{tuple(local_part(tensor).shape)} of {tuple(tensor.shape)}, "
                f"{list(tensor.placements)} on a mesh of {tuple(tensor.device_mesh.shape)}"
            )
            for name, tensor in self.tensors.items()
        }


class Island:
    """The ranks that hold one model together; a worker whose model is not sharded is alone."""

    def __init__(self, tensors: Mapping[str, Sharded], device: torch.device) -> None:
        """Collective among all ranks of the island."""
        leases = [lease_group(group, device) for group in _groups(tensors)]
        # After a clean end the next user may have the groups.
        self._releases = [finalize(self, lease.release) for lease in leases]
        self._comms = [ProcessGroupComm(lease.group, inside=True) for lease in leases]
        self._device = device
        self.place = ",".join(str(comm.rank) for comm in self._comms)
        """The rank's place in the island; empty if it is alone."""

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set on at least one rank of the island."""
        for comm in self._comms:
            own = torch.tensor([flag], dtype=torch.uint8, device=self._device)
            flags = comm.run(Collective("gather", [own], [1] * comm.size))
            flag = any(bool(int(one)) for one in flags)
        return flag

    @contextmanager
    def same_errors(self) -> Iterator[None]:
        """Raises an error of one rank on all of the island, so that none waits for that rank."""
        try:
            yield
        except Exception as error:
            kind = "config" if isinstance(error, ConfigError) else "peer"
            self._first_text(f"{kind}:{error}")
            raise
        kind, _, text = self._first_text("").partition(":")
        if kind:
            raise (ConfigError if kind == "config" else PeerError)(text)

    def abandon(self) -> None:
        """Keeps the groups from the next user, since a collective may have failed in them."""
        for release in self._releases:
            release.detach()

    def _first_text(self, text: str) -> str:
        for comm in self._comms:
            raw = bytearray(text.encode()[:MAX_ERROR_BYTES]) or bytearray(b" ")
            own = torch.frombuffer(raw, dtype=torch.uint8).to(self._device)
            texts = comm.run(Collective("gather", [own], limits=[MAX_ERROR_BYTES] * comm.size))
            found = [bytes(one.tolist()).decode(errors="replace").strip() for one in texts]
            text = next(filter(None, found), "")
        return text


def _groups(tensors: Mapping[str, Sharded]) -> list[dist.ProcessGroup]:
    """Returns the groups along all dimensions of the tensors' meshes, each once."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for tensor in tensors.values():
        for dim in range(tensor.device_mesh.ndim):
            group = tensor.device_mesh.get_group(dim)
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) > 1:
                found.setdefault(ranks, group)
    return list(found.values())
