"""Collectives, programs that issue them one after another, and the `Comm` that runs them."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from gradwire.comm.meter import Meter
from gradwire.comm.profiler_ranges import profiler_range
from gradwire.errors import WireError

T = TypeVar("T")

Kind: TypeAlias = Literal["mean", "gather", "all_to_all", "broadcast", "neighbors"]


@dataclass(frozen=True)
class Neighbors:
    """The ranks that one rank exchanges messages with, in ascending order, without itself."""

    targets: tuple[int, ...]
    """The ranks that it sends to."""
    sources: tuple[int, ...]
    """The ranks that it receives from; each of them has this rank among its targets."""


@dataclass(frozen=True)
class Subgroup:
    """Splits the ranks into groups, where `node` consecutive ranks form a node.

    A group holds the ranks of one node or, if `internode`, those at one index of every node.
    """

    node: int
    internode: bool

    def groups(self, size: int) -> list[list[int]]:
        """Returns the ranks of every group; a rank's number in a collective is its index there."""
        if self.internode:
            return [list(range(place, size, self.node)) for place in range(self.node)]
        return [list(range(first, first + self.node)) for first in range(0, size, self.node)]


@dataclass(frozen=True)
class Collective:
    """One collective. `buffers` are flat and contiguous, and may be overwritten.

    mean: takes one float buffer, returns its mean over ranks. gather: takes one buffer of bytes,
    returns one per rank. scatter: takes one buffer for each rank, returns one from each.
    broadcast: takes one buffer, returns the root's. neighbors: takes one buffer of bytes, sends it
    to every target and returns one from every source, in their order; no other rank is waited for.
    """

    kind: Kind
    buffers: list[Tensor]
    sizes: list[int] | None = None
    """Bytes to expect from each rank, or from each source; None when the ranks must exchange the
    sizes first."""
    limits: list[int] | None = None
    """Upper bound of each rank's size if `sizes` is None, checked before memory is allocated."""
    root: int = 0
    subgroup: Subgroup | None = None
    """The groups in which the collective runs; None means one group of all ranks."""
    neighbors: Neighbors | None = None
    """The peers of this rank; given for the kind "neighbors" only."""


def checked_sizes(
    sizes: list[int], limits: list[int] | None, ranks: Sequence[int] | None = None
) -> list[int]:
    """Returns the sizes that ranks announced; raises WireError if one exceeds its limit.

    `ranks` are those that announced them, by default all in order.
    """
    assert limits is not None, "sizes that ranks announce need limits"
    announcers = range(len(sizes)) if ranks is None else ranks
    for rank, size, limit in zip(announcers, sizes, limits, strict=True):
        if not 0 <= size <= limit:
            raise WireError(f"rank {rank} announces {size} bytes where {limit} is the most")
    return sizes


CollectiveProgram: TypeAlias = Generator[Collective, list[Tensor], T]
"""A coroutine that yields collectives, is sent the buffers they return, and returns a result."""


class Comm(ABC):
    """A group of ranks that run collectives in the order in which all of them request them."""

    rank: int
    size: int
    meter: Meter

    @abstractmethod
    def run(self, collective: Collective) -> list[Tensor]:
        """Runs the collective with all other ranks; raises PeerError if one of them is lost."""


def run_program(program: CollectiveProgram[T], comm: Comm) -> T:
    """Runs a program to its end and adds encode, wire and decode times to the meter."""
    start = perf_counter()
    spent = [0.0, 0.0, 0.0]
    phase = 0
    try:
        with profiler_range("encode"):
            collective = next(program)
        while True:
            before = perf_counter()
            spent[phase] += before - start
            with profiler_range("wire"):
                received = comm.run(collective)
            start = perf_counter()
            spent[1] += start - before
            phase = 2
            with profiler_range("decode"):
                collective = program.send(received)
    except StopIteration as end:
        spent[phase] += perf_counter() - start
        comm.meter.add_time(*spent)
        result: T = end.value
        return result
