"""Clusters: one process per worker with torchrun's environment, on emulated hosts or loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import ClassVar, Protocol

from gradwire.errors import ConfigError
from gradwire.testbed.hosts import Host, Testbed
from gradwire.testbed.launch import WorkerPlacement, launch
from gradwire.testbed.links import NetworkPlan
from gradwire.testbed.processes import OnLine
from gradwire.testbed.shaping import Shape


class Cluster(Protocol):
    """Runs one worker process per rank."""

    @property
    def workers(self) -> int: ...

    @property
    def shaped(self) -> bool:
        """True if the rate of the links is limited."""
        ...

    @property
    def note(self) -> str | None:
        """A caveat for readers of the results, if any."""
        ...

    @property
    def interface(self) -> str | None:
        """The name of the network interface that each worker has to itself, if it has one."""
        ...

    def launch(
        self,
        command: Sequence[str],
        *,
        on_line: OnLine | None = None,
        on_error_line: OnLine | None = None,
        extra_env: Mapping[str, str] = {},
    ) -> int:
        """Runs `command` once per rank; returns 0, or the first exit code that was not 0.

        Lines of stdout and stderr are passed to the callbacks, or printed with a "[rank] " prefix.
        """
        ...


@dataclass(frozen=True)
class TestbedCluster:
    """Runs one worker on each host of an open testbed."""

    __test__: ClassVar = False  # pytest would take the class for a test

    testbed: Testbed
    note: str | None = None

    @property
    def workers(self) -> int:
        return self.testbed.workers

    @property
    def shaped(self) -> bool:
        return self.testbed.rate is not None

    @property
    def interface(self) -> str:
        return self._hosts()[0].interface

    def launch(
        self,
        command: Sequence[str],
        *,
        on_line: OnLine | None = None,
        on_error_line: OnLine | None = None,
        extra_env: Mapping[str, str] = {},
    ) -> int:
        placements = [
            WorkerPlacement(
                host.address, host.interface, host.namespace, rank, local_rank=0, local_workers=1
            )
            for rank, host in enumerate(self._hosts())
        ]
        return launch(placements, command, on_line, on_error_line, extra_env)

    def _hosts(self) -> tuple[Host, ...]:
        if not self.testbed.hosts:
            raise ConfigError("testbed: launch needs an open testbed, use `with Testbed(...)`")
        return self.testbed.hosts


@dataclass(frozen=True)
class LoopbackCluster:
    """Runs all workers on this machine's loopback interface, without a rate limit."""

    workers: int
    note: str | None = "links are not shaped: plain loopback"
    shaped: ClassVar[bool] = False
    interface: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"cluster: workers must be at least 1, got {self.workers}")

    def launch(
        self,
        command: Sequence[str],
        *,
        on_line: OnLine | None = None,
        on_error_line: OnLine | None = None,
        extra_env: Mapping[str, str] = {},
    ) -> int:
        placements = [
            WorkerPlacement("127.0.0.1", "lo", None, 0, local_rank=rank, local_workers=self.workers)
            for rank in range(self.workers)
        ]
        return launch(placements, command, on_line, on_error_line, extra_env)


@contextmanager
def open_cluster(workers: int, rate: str | None) -> Iterator[Cluster]:
    """Opens emulated hosts with links of `rate`, or else loopback, with the reason in `note`."""
    Shape.parse(rate)
    reason = Testbed.reason_unavailable()
    if reason is not None:
        yield LoopbackCluster(workers, note=f"links are not shaped: {reason}")
        return
    with Testbed(workers, rate) as testbed:
        yield TestbedCluster(testbed)


def run_on_testbed(command: Sequence[str], plan: NetworkPlan) -> int:
    """Runs `command` on emulated hosts and returns its exit code; raises if there are none.

    Links that change do so while it runs.
    """
    if not command:
        raise ConfigError("net: expected a command after the options, such as: -- python train.py")
    testbed = Testbed(len(plan.links), None, plan)
    reason = Testbed.reason_unavailable()
    if reason is not None:
        raise ConfigError(f"net: no emulated hosts here: {reason}")
    ended = Event()

    def change_links() -> None:
        start_s = monotonic()
        for change in plan.changes:
            if ended.wait(max(0.0, start_s + change.at_s - monotonic())):
                return
            testbed.change(change.options, change.workers)

    with testbed:
        changes = Thread(target=change_links, name="gradwire-links", daemon=True)
        changes.start()
        try:
            return TestbedCluster(testbed).launch(command)
        finally:
            ended.set()
            changes.join()
