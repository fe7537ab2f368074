"""Workers of a local method: ranks of a process group, or simulated workers in this process.

A background thread, and on a GPU a side stream, runs collectives while the worker computes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar, cast
from weakref import finalize

import torch
import torch.distributed as dist

from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram, Comm, drive
from gradwire.comm.groups import borrow, check_member
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.comm.side_stream import SideStream
from gradwire.comm.simulated import Simulated
from gradwire.errors import ConfigError, PeerError

Wait: TypeAlias = Callable[[], None]
"""Returns when a conversation is over, and raises what went wrong in it."""


class Beside:
    """Holds one conversation after the other, in the order in which they were started."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        self._thread = ThreadPoolExecutor(1, "gradwire-local", initializer=self._side.settle)

    def start(self, conversation: CollectiveProgram[None], comm: Comm) -> Wait:
        """Begins when the GPU has done what it was given so far; what it is given later goes on."""
        over = self._thread.submit(self._hold, conversation, comm, self._side.mark())
        return lambda: self._side.join(over.result())

    def end(self, *, wait: bool) -> None:
        self._thread.shutdown(wait=wait)

    def _hold(
        self, conversation: CollectiveProgram[None], comm: Comm, begin: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """The point on the side from which on all is there that the conversation has brought."""
        with self._side.after(begin):
            drive(conversation, comm)
            return self._side.mark()


T = TypeVar("T")


class Peers(ABC):
    """Workers that hold the same conversations in the same order."""

    rank: int
    size: int
    meter: Meter
    """What the method says."""
    aside: Meter
    """What is said before it starts, and for evaluation."""

    @abstractmethod
    def talk(self, conversation: CollectiveProgram[None], *, aside: bool = False) -> None:
        """Holds a conversation with all others; simulated workers' begins when the last comes."""

    @abstractmethod
    def start(self, conversation: CollectiveProgram[None], *, in_peace: bool = False) -> Wait:
        """Begins a conversation that goes on while this worker computes, or `in_peace` does not."""

    @abstractmethod
    def check_over(self) -> None:
        """Raises PeerError if this worker's last conversation has yet to begin."""

    @abstractmethod
    def rest(self, *, wait: bool) -> None:
        """Ends what runs beside; waits for what is under way, or leaves it to itself."""

    @abstractmethod
    def prepare(self, node: int | None) -> None:
        """Gets ready for exchanges among nodes of so many ranks."""


class GroupPeers(Peers):
    """The ranks of a process group, in a group of our own."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "there is no process group: call torch.distributed.init_process_group, or take a "
                "seat of gradwire.local.simulated(workers)"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        check_member(group)
        loan = borrow(group, device)
        # Whoever ends in peace leaves the group to the next.
        self._give_back = finalize(self, loan.give_back)
        self._comm, self._aside = ProcessGroupComm(loan.group), ProcessGroupComm(loan.group)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.meter, self.aside = self._comm.meter, self._aside.meter
        self._device = device
        self._beside: Beside | None = None

    def talk(self, conversation: CollectiveProgram[None], *, aside: bool = False) -> None:
        comm = self._aside if aside else self._comm
        if self._beside is None:
            drive(conversation, comm)
        else:
            # Behind what is under way, since calls must come in the same order on all ranks.
            self._beside.start(conversation, comm)()

    def start(self, conversation: CollectiveProgram[None], *, in_peace: bool = False) -> Wait:
        if self._beside is None:
            self._beside = Beside(self._device)
        wait = self._beside.start(conversation, self._comm)
        if in_peace:
            wait()
        return wait

    def check_over(self) -> None:
        pass

    def rest(self, *, wait: bool) -> None:
        if not wait:
            self._give_back.detach()
        if self._beside is not None:
            self._beside.end(wait=wait)
            self._beside = None

    def prepare(self, node: int | None) -> None:
        self._comm.prepare(node)


class Seat(Peers):
    """One worker's place among those of `simulated`."""

    def __init__(self, table: "_Table", rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size
        self.meter, self.aside = table.network.meters[rank], table.aside.meters[rank]

    def talk(self, conversation: CollectiveProgram[None], *, aside: bool = False) -> None:
        self._table.come(self.rank, conversation, aside)

    def start(self, conversation: CollectiveProgram[None], *, in_peace: bool = False) -> Wait:
        self._table.come(self.rank, conversation, aside=False)
        return self.check_over

    def check_over(self) -> None:
        self._table.check_over(self.rank)

    def share(self, name: str, thing: T | None) -> T:
        """What worker 0 has put on the table under this name."""
        if thing is not None:
            self._table.things[name] = thing
        return cast(T, self._table.things[name])

    def rest(self, *, wait: bool) -> None:
        pass

    def prepare(self, node: int | None) -> None:
        pass


class _Table:
    """Workers who take each step in turn; what they say is said when the last one has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.network, self.aside = Simulated(size), Simulated(size)
        self.things: dict[str, object] = {}
        self._here: dict[int, CollectiveProgram[None]] = {}

    def come(self, rank: int, conversation: CollectiveProgram[None], aside: bool) -> None:
        self.check_over(rank)
        self._here[rank] = conversation
        if len(self._here) == self.size:
            talks = [self._here[rank] for rank in range(self.size)]
            self._here = {}
            (self.aside if aside else self.network).run(talks)

    def check_over(self, rank: int) -> None:
        if rank in self._here:
            late = sorted(set(range(self.size)) - self._here.keys())
            raise PeerError(f"simulated worker {rank} goes on, but workers {late} have yet to come")


def simulated(workers: int) -> list[Seat]:
    """Seats for so many workers in this process, who take each step one after the other.

    They talk when the last of them has taken the step; until then the others' models are waiting.
    """
    check_whole("simulated", "workers", workers, 1)
    table = _Table(workers)
    return [Seat(table, rank) for rank in range(workers)]


Group: TypeAlias = dist.ProcessGroup | Seat | None
"""Who takes part; None means all ranks of torch's default group."""


def peers_of(group: Group, device: torch.device) -> Peers:
    return group if isinstance(group, Seat) else GroupPeers(group, device)
