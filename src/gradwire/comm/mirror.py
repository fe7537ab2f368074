"""One rank of a world whose other members are not there: they say what it says itself.

So one rank's way through any number of ranks can be walked in this process, with the bytes and the
calls of a real one. What comes back is a real message, if not that of another rank.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.base import Collective, Comm, Kind, Subgroup
from gradwire.comm.meter import Meter


class Said(NamedTuple):
    """A call as the network sees it."""

    kind: Kind
    nbytes: int
    """Of mean and broadcast the buffer, of gather one rank's message, of scatter all for others."""
    size: int
    """Ranks that take part."""
    inside: bool
    """Only ranks of one node do."""


class Unheard(Exception):
    """Another rank's answer has another length than this rank's, so it cannot be made up."""


class _Circle(NamedTuple):
    """Who takes part in a call, as this rank sees it."""

    size: int
    place: int
    inside: bool


class Ghost(Comm):
    """Rank `rank` of `size`; `said` are its calls in order.

    `alike` are ranks that hear messages of its own form, where each hears about another shard.
    Shards can differ in length, and then so do the answers of their ranks. That call is counted,
    and `Unheard` is raised where it would be decoded. In all exchanges it is the last one.
    """

    def __init__(self, size: int, rank: int = 0, alike: Collection[int] = ()) -> None:
        self.size, self.rank, self.alike = size, rank, alike
        self.meter = Meter()
        self.said: list[Said] = []
        self._torn = False

    def answer(self, call: Collective) -> list[Tensor]:
        circle = self._circle(call.ring)
        if call.kind in ("gather", "scatter") and call.sizes is None and circle.size > 1:
            self._tell_lengths(call.kind, circle)
        if call.kind == "mean":
            return self._mean(call.buffers[0], circle)
        if call.kind == "gather":
            return self._gather(call, circle)
        if call.kind == "scatter":
            return self._scatter(call, circle)
        return self._broadcast(call, circle)

    def _circle(self, ring: Subgroup | None) -> _Circle:
        if ring is None:
            return _Circle(self.size, self.rank, inside=False)
        if ring.across:
            return _Circle(self.size // ring.node, self.rank // ring.node, inside=False)
        return _Circle(ring.node, self.rank % ring.node, inside=True)

    def _mean(self, buffer: Tensor, circle: _Circle) -> list[Tensor]:
        self.meter.mean(buffer.nbytes, circle.size, inside=circle.inside)
        self._note("mean", buffer.nbytes, circle)
        return [buffer]

    def _gather(self, call: Collective, circle: _Circle) -> list[Tensor]:
        [buffer] = call.buffers
        longest = max(call.sizes or [buffer.numel()])
        self.meter.gather(longest, circle.size, inside=circle.inside)
        self._note("gather", longest, circle)
        sizes = call.sizes or [buffer.numel()] * circle.size
        torn, self._torn = self._torn or set(sizes) != {buffer.numel()}, False
        if not torn:
            return [buffer] * circle.size
        if call.ring is None or not call.ring.across:
            raise Unheard
        # The ranks of a node pass on what came from other nodes before they decode it.
        self._torn = True
        return [buffer.new_zeros(nbytes) for nbytes in sizes]

    def _scatter(self, call: Collective, circle: _Circle) -> list[Tensor]:
        own = call.buffers[circle.place]
        sent = sum(buffer.numel() for buffer in call.buffers) - own.numel()
        self.meter.scatter(sent, (circle.size - 1) * own.numel(), inside=circle.inside)
        self._note("scatter", sent, circle)
        if call.sizes is None or call.ring is not None:
            return [own] * circle.size
        # What it says about the others' shards, where that has the form of what it hears: equal
        # messages would add up to one as sparse as each, which is not what ranks get to encode.
        said = enumerate(call.buffers)
        return [other if rank in self.alike else own for rank, other in said]

    def _broadcast(self, call: Collective, circle: _Circle) -> list[Tensor]:
        [buffer] = call.buffers
        self.meter.broadcast(buffer.numel(), circle.place == call.root, inside=circle.inside)
        self._note("broadcast", buffer.numel(), circle)
        return [buffer]

    def _tell_lengths(self, kind: Literal["gather", "scatter"], circle: _Circle) -> None:
        word = torch.int64.itemsize
        others = (circle.size - 1) * word
        if kind == "gather":
            self.meter.gather(word, circle.size, inside=circle.inside)
        else:
            self.meter.scatter(others, others, inside=circle.inside)
        self._note(kind, word if kind == "gather" else others, circle)

    def _note(self, kind: Kind, nbytes: int, circle: _Circle) -> None:
        self.said.append(Said(kind, nbytes, circle.size, circle.inside))
