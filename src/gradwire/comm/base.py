"""What a bucket asks of the network, and who answers."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from gradwire.comm.meter import Meter
from gradwire.errors import WireError

T = TypeVar("T")

Kind: TypeAlias = Literal["mean", "gather", "scatter", "broadcast"]


@dataclass(frozen=True)
class Subgroup:
    """Who talks to whom where `node` consecutive ranks are a node.

    The ranks of each node among themselves; or, across, those at the same place in their nodes.
    """

    node: int
    across: bool

    def groups(self, size: int) -> list[list[int]]:
        """The ranks of every ring, in order; a rank's number in a call is its place there."""
        if self.across:
            return [list(range(place, size, self.node)) for place in range(self.node)]
        return [list(range(first, first + self.node)) for first in range(0, size, self.node)]


@dataclass(frozen=True)
class Collective:
    """One collective. `buffers` are flat and contiguous, and may be overwritten.

    mean: one float buffer, answered by the mean over ranks. gather: one buffer of bytes, answered
    by one a rank. scatter: one buffer for each rank, answered by one from each. broadcast: one
    buffer, answered by the root's.
    """

    kind: Kind
    buffers: list[Tensor]
    sizes: list[int] | None = None
    """Bytes to expect from each rank; None when they must be told first."""
    limits: list[int] | None = None
    """The most bytes that each rank may tell then; more is refused before room is made for it."""
    root: int = 0
    ring: Subgroup | None = None
    """Which ranks take part: all of them, or those of each ring among themselves."""


def bounded(sizes: list[int], limits: list[int] | None) -> list[int]:
    """The sizes that ranks told, if none tells more than it can have to say."""
    assert limits is not None, "sizes that must be told need limits"
    for rank, (size, limit) in enumerate(zip(sizes, limits, strict=True)):
        if not 0 <= size <= limit:
            raise WireError(f"rank {rank} announces {size} bytes where {limit} is the most")
    return sizes


CollectiveProgram: TypeAlias = Generator[Collective, list[Tensor], T]
"""A bucket's way through its rounds: yields calls, is sent the buffers that came back."""


class Comm(ABC):
    """A group of ranks that answer calls in the order in which all of them make them."""

    rank: int
    size: int
    meter: Meter

    @abstractmethod
    def answer(self, call: Collective) -> list[Tensor]:
        """Carries the call out together with all other ranks; raises PeerError when one is gone."""


def drive(conversation: CollectiveProgram[T], comm: Comm) -> T:
    """Runs a conversation to its end, and notes where the time went."""
    start = perf_counter()
    spent = [0.0, 0.0, 0.0]
    phase = 0
    try:
        call = next(conversation)
        while True:
            before = perf_counter()
            spent[phase] += before - start
            answer = comm.answer(call)
            start = perf_counter()
            spent[1] += start - before
            phase = 2
            call = conversation.send(answer)
    except StopIteration as end:
        spent[phase] += perf_counter() - start
        comm.meter.spent(*spent)
        result: T = end.value
        return result
