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
from torch.distributed.device_mesh import DeviceMesh

from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram, Comm, run_program
from gradwire.comm.groups import check_member, group_of_mesh, lease_group
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.comm.side_stream import SideStream
from gradwire.comm.simulated import Simulated
from gradwire.errors import ConfigError, PeerError

Wait: TypeAlias = Callable[[], None]
"""Returns when a collective program has finished, and raises its error."""


class BackgroundRunner:
    """Runs collective programs in a thread, one after the other, in the order of their start."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        initializer = self._side.configure_thread
        self._thread = ThreadPoolExecutor(1, "gradwire-local", initializer=initializer)

    def start(self, program: CollectiveProgram[None], comm: Comm) -> Wait:
        """Starts a program after the GPU work issued so far; later GPU work runs in parallel."""
        result = self._thread.submit(self._run, program, comm, self._side.record_event())
        return lambda: self._side.wait_event(result.result())

    def end(self, *, wait: bool) -> None:
        self._thread.shutdown(wait=wait)

    def _run(
        self, program: CollectiveProgram[None], comm: Comm, begin: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Runs a program on the side stream; returns the event that follows its results."""
        with self._side.after(begin):
            run_program(program, comm)
            return self._side.record_event()


T = TypeVar("T")


class Workers(ABC):
    """Runs collective programs with all other workers, which start the same ones in one order."""

    rank: int
    size: int
    meter: Meter
    """Counts the traffic of the method."""
    aux_meter: Meter
    """Counts the traffic of startup and evaluation."""

    @abstractmethod
    def run(self, program: CollectiveProgram[None], *, auxiliary: bool = False) -> None:
        """Runs a program; simulated workers run it when the last of them has called this."""

    @abstractmethod
    def start(self, program: CollectiveProgram[None], *, blocking: bool = False) -> Wait:
        """Starts a program that runs while this worker computes, or finishes it if `blocking`."""

    @abstractmethod
    def check_finished(self) -> None:
        """Raises PeerError if this worker's last program has not run yet."""

    @abstractmethod
    def shutdown(self, *, wait: bool) -> None:
        """Ends the background thread; waits for programs under way, or abandons them."""

    @abstractmethod
    def prepare(self, node: int | None) -> None:
        """Creates the groups for exchanges among nodes of `node` ranks."""


class ProcessGroupWorkers(Workers):
    """The ranks of a process group, which communicate in a group of their own."""

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, device: torch.device) -> None:
        lease = lease_group(_process_group(group), device)
        # After a clean end the next user may have the group.
        self._release = finalize(self, lease.release)
        self._comm, self._aux_comm = ProcessGroupComm(lease.group), ProcessGroupComm(lease.group)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.meter, self.aux_meter = self._comm.meter, self._aux_comm.meter
        self._device = device
        self._background: BackgroundRunner | None = None

    def run(self, program: CollectiveProgram[None], *, auxiliary: bool = False) -> None:
        comm = self._aux_comm if auxiliary else self._comm
        if self._background is None:
            run_program(program, comm)
        else:
            # Queued, since all ranks must issue collectives in the same order.
            self._background.start(program, comm)()

    def start(self, program: CollectiveProgram[None], *, blocking: bool = False) -> Wait:
        if self._background is None:
            self._background = BackgroundRunner(self._device)
        wait = self._background.start(program, self._comm)
        if blocking:
            wait()
        return wait

    def check_finished(self) -> None:
        pass

    def shutdown(self, *, wait: bool) -> None:
        if not wait:
            self._release.detach()
        if self._background is not None:
            self._background.end(wait=wait)
            self._background = None

    def prepare(self, node: int | None) -> None:
        self._comm.prepare(node)


class SimulatedWorker(Workers):
    """One of the workers that `simulated` creates."""

    def __init__(self, simulation: "_Simulation", rank: int) -> None:
        self._simulation, self.rank, self.size = simulation, rank, simulation.size
        self.meter = simulation.network.meters[rank]
        self.aux_meter = simulation.aux_network.meters[rank]

    def run(self, program: CollectiveProgram[None], *, auxiliary: bool = False) -> None:
        self._simulation.submit(self.rank, program, auxiliary)

    def start(self, program: CollectiveProgram[None], *, blocking: bool = False) -> Wait:
        self._simulation.submit(self.rank, program, auxiliary=False)
        return self.check_finished

    def check_finished(self) -> None:
        self._simulation.check_finished(self.rank)

    def share(self, name: str, value: T | None) -> T:
        """Returns the value that worker 0 has shared under this name."""
        if value is not None:
            self._simulation.shared[name] = value
        return cast(T, self._simulation.shared[name])

    def shutdown(self, *, wait: bool) -> None:
        pass

    def prepare(self, node: int | None) -> None:
        pass


class _Simulation:
    """Collects the programs of all workers, and runs them when the last one is submitted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.network, self.aux_network = Simulated(size), Simulated(size)
        self.shared: dict[str, object] = {}
        self._submitted: dict[int, CollectiveProgram[None]] = {}

    def submit(self, rank: int, program: CollectiveProgram[None], auxiliary: bool) -> None:
        self.check_finished(rank)
        self._submitted[rank] = program
        if len(self._submitted) == self.size:
            programs = [self._submitted[rank] for rank in range(self.size)]
            self._submitted = {}
            (self.aux_network if auxiliary else self.network).run(programs)

    def check_finished(self, rank: int) -> None:
        if rank in self._submitted:
            late = sorted(set(range(self.size)) - self._submitted.keys())
            raise PeerError(
                f"simulated worker {rank} continues, but workers {late} have not reached this sync"
            )


def simulated(workers: int) -> list[SimulatedWorker]:
    """Creates workers in this process, which take each step one after the other.

    They communicate when the last of them has taken the step; until then the models of the others
    are not synchronised.
    """
    check_whole("simulated", "workers", workers, 1)
    simulation = _Simulation(workers)
    return [SimulatedWorker(simulation, rank) for rank in range(workers)]


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Workers | None
"""The workers that take part; None means all ranks of torch's default group.

A mesh has one dimension: that between islands.
"""


def ranks_of(group: Group) -> list[int]:
    """Returns the global ranks of a process group; other workers have none."""
    if isinstance(group, Workers):
        return []
    return dist.get_process_group_ranks(_process_group(group))


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the group, or torch's default one for None; raises ConfigError if it is unusable."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: call torch.distributed.init_process_group, or pass a "
            "worker of gradwire.local.simulated(workers)"
        )
    if isinstance(group, DeviceMesh):
        return group_of_mesh(group)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    check_member(group)
    return group


def workers_of(group: Group, device: torch.device) -> Workers:
    return group if isinstance(group, Workers) else ProcessGroupWorkers(group, device)
