"""Process groups of our own, so that our messages never mix with the user's or SyncBatchNorm's.

A group costs threads, sockets and (on NCCL) seconds, and cannot safely be destroyed: torch names a
new one after the number of those alive, and might find the traces of the last one of that name. So
a group that is no longer in use is kept for the next lease.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comm.base import Subgroup
from gradwire.errors import ConfigError


@dataclass
class _Pool:
    """The groups made for the ranks of one of the user's groups; `free` are unused on this rank."""

    made: list[dist.ProcessGroup] = field(default_factory=list)
    free: set[int] = field(default_factory=set)


# A pool is collected together with the user's group that it belongs to.
_pools: WeakKeyDictionary[dist.ProcessGroup, _Pool] = WeakKeyDictionary()
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[Subgroup, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def check_member(group: object) -> None:
    """Raises ConfigError unless this is a process group of torch that contains this rank."""
    # torch returns NON_GROUP_MEMBER to ranks that create a group without being in it.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"process_group: rank {dist.get_rank()} is not in this group; call on its ranks only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"process_group: expected a ProcessGroup, got {group!r}")


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the group of a mesh; raises ConfigError unless it has one dimension and this rank."""
    if mesh.ndim != 1:
        raise ConfigError(
            f"process_group: expected a mesh of one dimension, got {mesh.ndim} "
            f"{mesh.mesh_dim_names or ''}; pick one, like mesh['replicate']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"process_group: rank {dist.get_rank()} is not in this mesh; call on its ranks only"
        )
    return mesh.get_group()


class GroupLease:
    """A group of the same ranks as another, for one user at a time."""

    def __init__(self, group: dist.ProcessGroup, number: int, pool: _Pool) -> None:
        self.group = group
        self._number, self._pool = number, pool

    def release(self) -> None:
        """Returns the group to its pool; no collective may be running or have failed in it."""
        self._pool.free.add(self._number)


def lease_group(group: dist.ProcessGroup, device: torch.device) -> GroupLease:
    """Leases the first group made for these ranks that is free on all of them, or a new one.

    Called on all ranks. One of them may still hold a group that others have released, for example
    through a model that is not collected yet, so the ranks compare their free groups.
    """
    pool = _pools.setdefault(group, _Pool())
    everywhere = torch.zeros(len(pool.made), dtype=torch.int32, device=device)
    everywhere[sorted(pool.free)] = 1
    if pool.made:
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    free = everywhere.nonzero().view(-1).tolist()
    number = free[0] if free else len(pool.made)
    if not free:
        pool.made.append(_new_group(group, dist.get_process_group_ranks(group), device))
    pool.free.discard(number)
    return GroupLease(pool.made[number], number, pool)


def subgroup_process_group(group: dist.ProcessGroup, subgroup: Subgroup) -> dist.ProcessGroup:
    """Returns the part of a leased group that contains this rank; made once, leased with it."""
    made = _subgroups.setdefault(group, {})
    if subgroup not in made:
        world = dist.get_process_group_ranks(group)
        [mine] = [ranks for ranks in subgroup.groups(group.size()) if group.rank() in ranks]
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        made[subgroup] = _new_group(group, [world[rank] for rank in mine], device)
    return made[subgroup]


def _new_group(
    like: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    """Creates a group of these global ranks with the timeout and backend of `like`."""
    _equalise_group_counts(like, device)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=like._get_backend(device).options._timeout,
        backend="nccl" if dist.get_backend(like) == "nccl" else "gloo",
        use_local_synchronization=True,
        group_desc="gradwire",
    )
    return made


def _equalise_group_counts(group: dist.ProcessGroup, device: torch.device) -> None:
    """Brings all ranks to the same number of groups.

    torch names a new group after the number that a rank has already, so ranks that have been in
    fewer would wait for each other under different names for ever.
    """
    groups = dist.distributed_c10d._world.pg_names
    most = torch.tensor(len(groups), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while len(groups) < int(most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
