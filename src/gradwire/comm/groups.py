"""Groups of our own: what we send must not mix with what the user or SyncBatchNorm sends.

A group costs threads, sockets and (on NCCL) seconds, and cannot safely be destroyed: torch names a
new one after the number of those alive, and might find the traces of the last one of that name. So
a group that nobody uses any more waits for the next user.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire.comm.base import Subgroup
from gradwire.errors import ConfigError


@dataclass
class _Pool:
    """The groups made for the ranks of one group of the user's, and which of them are free here."""

    made: list[dist.ProcessGroup] = field(default_factory=list)
    free: set[int] = field(default_factory=set)


# A pool dies with the group that it is for, when the user destroys that.
_pools: WeakKeyDictionary[dist.ProcessGroup, _Pool] = WeakKeyDictionary()
_rings: WeakKeyDictionary[dist.ProcessGroup, dict[Subgroup, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def check_member(group: object) -> None:
    """Raises ConfigError unless this is a group of torch's, with this rank in it."""
    # What torch gives to those who are not in a group that they have made.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"process_group: rank {dist.get_rank()} is not in this group; call on its ranks only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"process_group: expected a ProcessGroup, got {group!r}")


class GroupLease:
    """A group of the same ranks as another, for one user at a time."""

    def __init__(self, group: dist.ProcessGroup, number: int, pool: _Pool) -> None:
        self.group = group
        self._number, self._pool = number, pool

    def give_back(self) -> None:
        """Nothing is under way in it any more, and nothing has gone wrong in it."""
        self._pool.free.add(self._number)


def borrow(group: dist.ProcessGroup, device: torch.device) -> GroupLease:
    """The first of the groups made for these ranks that is free on all of them, or a new one.

    Called on all ranks. One of them may still hold what others have given back, such as a model
    that is not collected yet, so they ask each other.
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


def subgroup_process_group(group: dist.ProcessGroup, ring: Subgroup) -> dist.ProcessGroup:
    """The members of a group of ours that share a ring with this rank; made once, lent with it."""
    made = _rings.setdefault(group, {})
    if ring not in made:
        world = dist.get_process_group_ranks(group)
        [mine] = [ranks for ranks in ring.groups(group.size()) if group.rank() in ranks]
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        made[ring] = _new_group(group, [world[rank] for rank in mine], device)
    return made[ring]


def _new_group(
    like: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    """A group of these ranks of the world, with the timeout and backend of another."""
    _count_alike(like, device)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=like._get_backend(device).options._timeout,
        backend="nccl" if dist.get_backend(like) == "nccl" else "gloo",
        use_local_synchronization=True,
        group_desc="gradwire",
    )
    return made


def _count_alike(group: dist.ProcessGroup, device: torch.device) -> None:
    """Brings all ranks to the same number of groups.

    torch names a new group after the number that a rank has already, so ranks that have been in
    fewer would wait for each other under different names for ever.
    """
    groups = dist.distributed_c10d._world.pg_names
    most = torch.tensor(len(groups), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while len(groups) < int(most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
