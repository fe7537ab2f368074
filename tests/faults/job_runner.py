"""Runs a job repeatedly on four emulated hosts, each time in new processes.

torch is imported once, and processes are forked from there, so an attempt starts quickly.
"""

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch._dynamo  # DDP and optimisers import it at first use
from fault_injection import Fault
from killable_job import Job, mlp, train

import gradwire
from gradwire.testbed.hosts import Testbed

PATIENCE_S = 20.0
"""Seconds after its timeout at which a process that has not ended counts as hung."""

Event: TypeAlias = dict[str, Any]
React: TypeAlias = Callable[[Event, list[int]], None]
"""Called with every event of a rank and the process ids of all ranks."""


@dataclass
class Attempt:
    """The events that the ranks of one run emitted, and their exit codes."""

    events: list[Event] = field(default_factory=list)
    codes: list[int | str] = field(default_factory=list)

    def of(self, event: str) -> list[Event]:
        return [e for e in self.events if e["event"] == event]

    def losses(self) -> dict[tuple[int, int], str]:
        return {(e["rank"], e["step"]): e["loss"] for e in self.of("step")}

    def weights(self) -> list[str]:
        return [e["weights"] for e in self.of("end")]

    def detected_s(self) -> list[float]:
        """Returns the seconds from the kill to the error of each surviving rank."""
        [killed] = self.of("killed")
        return [e["at_s"] - killed["at_s"] for e in self.of("error")]


class HostRunner:
    """Runs jobs on the hosts of an open testbed."""

    def __init__(self, testbed: Testbed, job: Job) -> None:
        self._testbed = testbed
        self._port = 20_000
        _load_kernels(job)
        # Frozen objects are not collected when a child ends, which would take seconds.
        gc.freeze()

    def run(self, job: Job, fault: Fault | None = None, react: React | None = None) -> Attempt:
        self._port += 1
        read_end, write_end = os.pipe()
        pids = [self._start(rank, write_end, job, fault) for rank in range(self._testbed.workers)]
        os.close(write_end)
        attempt = Attempt()
        deadline_s = time.monotonic() + 3 * job.timeout_s + PATIENCE_S
        for event in _events(read_end, deadline_s):
            attempt.events.append(event)
            if react is not None:
                react(event, pids)
        attempt.codes = [_end_of(pid, deadline_s) for pid in pids]
        os.close(read_end)
        return attempt

    def _start(self, rank: int, write_end: int, job: Job, fault: Fault | None) -> int:
        pid = os.fork()
        if pid == 0:
            os.dup2(write_end, sys.stdout.fileno())
            host = self._testbed.hosts[rank]
            host.namespace.enter()
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._testbed.workers),
                "MASTER_ADDR": self._testbed.hosts[0].address,
                "MASTER_PORT": str(self._port),
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            train((job, fault))
            sys.exit()
        return pid


def _load_kernels(job: Job) -> None:
    model = mlp(job.width)
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    network = gradwire.simulate(model, job.spec, workers=2, exchange=job.exchange)
    network.step([gradients, gradients])


def _events(read_end: int, deadline_s: float) -> Iterator[Event]:
    """Yields events as they are emitted, until all processes have ended."""
    rest = b""
    while select.select([read_end], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        block = os.read(read_end, 1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        yield from map(json.loads, lines)


def _end_of(pid: int, deadline_s: float) -> int | str:
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"
