"""Runs the collectives of one rank without its peers: their messages mirror its own.

So the steps of one rank in a world of any size can be executed in this process, with the bytes and
the collectives of a real one. The messages it receives are valid, but not those of other ranks.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.base import Collective, Comm, Kind, Subgroup
from gradwire.comm.meter import Meter


class CollectiveRecord(NamedTuple):
    """A collective as the network sees it."""

    kind: Kind
    nbytes: int
    """Bytes of a mean's or broadcast's buffer, of one rank's message in a gather, or of all
    messages to other ranks in a scatter or to neighbors."""
    size: int
    """Ranks that take part."""
    inside: bool
    """True if only ranks of one node take part."""


class UnknownAnswer(Exception):
    """Another rank's message has another length than this rank's, so it cannot be mirrored."""


class _Group(NamedTuple):
    """The ranks that take part in a collective, and this rank's position among them."""

    size: int
    position: int
    inside: bool


class MirrorComm(Comm):
    """Acts as rank `rank` of `size`; `records` are its collectives in order.

    `alike` are the ranks whose received messages have this rank's format, in exchanges in which
    each rank receives messages about another shard. Shards can differ in length, and then so do
    the gathered messages. Such a gather is counted, and `UnknownAnswer` is raised where its result
    would be decoded. In all exchanges it is the last collective.
    """

    def __init__(self, size: int, rank: int = 0, alike: Collection[int] = ()) -> None:
        self.size, self.rank, self.alike = size, rank, alike
        self.meter = Meter()
        self.records: list[CollectiveRecord] = []
        self._unknown = False

    def run(self, collective: Collective) -> list[Tensor]:
        group = self._group(collective.subgroup)
        if (
            collective.kind in ("gather", "all_to_all")
            and collective.sizes is None
            and group.size > 1
        ):
            self._count_sizes(collective.kind, group)
        if collective.kind == "mean":
            return self._mean(collective.buffers[0], group)
        if collective.kind == "gather":
            return self._gather(collective, group)
        if collective.kind == "all_to_all":
            return self._scatter(collective, group)
        if collective.kind == "neighbors":
            return self._neighbors(collective, group)
        return self._broadcast(collective, group)

    def _group(self, subgroup: Subgroup | None) -> _Group:
        if subgroup is None:
            return _Group(self.size, self.rank, inside=False)
        if subgroup.internode:
            return _Group(self.size // subgroup.node, self.rank // subgroup.node, inside=False)
        return _Group(subgroup.node, self.rank % subgroup.node, inside=True)

    def _mean(self, buffer: Tensor, group: _Group) -> list[Tensor]:
        self.meter.mean(buffer.nbytes, group.size, inside=group.inside)
        self._record("mean", buffer.nbytes, group)
        return [buffer]

    def _gather(self, collective: Collective, group: _Group) -> list[Tensor]:
        [buffer] = collective.buffers
        longest = max(collective.sizes or [buffer.numel()])
        self.meter.gather(longest, group.size, inside=group.inside)
        self._record("gather", longest, group)
        sizes = collective.sizes or [buffer.numel()] * group.size
        unknown, self._unknown = self._unknown or set(sizes) != {buffer.numel()}, False
        if not unknown:
            return [buffer] * group.size
        if collective.subgroup is None or not collective.subgroup.internode:
            raise UnknownAnswer
        # The ranks of a node gather what came from other nodes before they decode it.
        self._unknown = True
        return [buffer.new_zeros(nbytes) for nbytes in sizes]

    def _scatter(self, collective: Collective, group: _Group) -> list[Tensor]:
        own = collective.buffers[group.position]
        sent = sum(buffer.numel() for buffer in collective.buffers) - own.numel()
        self.meter.all_to_all(sent, (group.size - 1) * own.numel(), inside=group.inside)
        self._record("all_to_all", sent, group)
        if collective.sizes is None or collective.subgroup is not None:
            return [own] * group.size
        # Its messages about the others' shards, where they have the format of those it receives:
        # equal messages would add up to one as sparse as each, which is not what ranks encode.
        sent_to = enumerate(collective.buffers)
        return [other if rank in self.alike else own for rank, other in sent_to]

    def _neighbors(self, collective: Collective, group: _Group) -> list[Tensor]:
        [buffer], peers = collective.buffers, collective.neighbors
        assert peers is not None, "a collective among neighbors needs them"
        targets, sources = len(peers.targets), len(peers.sources)
        lengths = [buffer.numel()]
        if collective.sizes is None and targets:
            lengths.insert(0, torch.int64.itemsize)
        for nbytes in lengths:
            self.meter.neighbors(nbytes, targets, sources * nbytes)
            self._record("neighbors", targets * nbytes, group)
        return [buffer] * sources

    def _broadcast(self, collective: Collective, group: _Group) -> list[Tensor]:
        [buffer] = collective.buffers
        self.meter.broadcast(buffer.numel(), group.position == collective.root, inside=group.inside)
        self._record("broadcast", buffer.numel(), group)
        return [buffer]

    def _count_sizes(self, kind: Literal["gather", "all_to_all"], group: _Group) -> None:
        """Counts the collective in which ranks announce the sizes of their messages."""
        word = torch.int64.itemsize
        others = (group.size - 1) * word
        if kind == "gather":
            self.meter.gather(word, group.size, inside=group.inside)
        else:
            self.meter.all_to_all(others, others, inside=group.inside)
        self._record(kind, word if kind == "gather" else others, group)

    def _record(self, kind: Kind, nbytes: int, group: _Group) -> None:
        self.records.append(CollectiveRecord(kind, nbytes, group.size, group.inside))
