"""Runs a job repeatedly on emulated hosts, each time in new processes.

torch is imported once, and processes are forked from there, so an attempt starts quickly.
"""

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
import torch._dynamo  # DDP and optimisers import it at first use

import gradwire
from gradwire.bench.faults.injection import Fault
from gradwire.bench.faults.jobs import Job, mlp, run
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

    def weights(self) -> dict[int, str]:
        return {e["rank"]: e["weights"] for e in self.of("end")}

    def hung(self) -> int:
        return self.codes.count("hung")


class HostRunner:
    """Runs jobs on the hosts of an open testbed; `quiet` hides what they write to stderr."""

    def __init__(self, testbed: Testbed, quiet: bool = False) -> None:
        self.testbed, self._quiet = testbed, quiet
        self._port = 20_000

    def prepare(self, job: Job) -> None:
        """Compiles or loads the job's kernels before processes are forked."""
        model = mlp(job.width)
        gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        network = gradwire.simulate(model, job.spec, workers=2, exchange=job.exchange)
        network.step([gradients, gradients])
        # Frozen objects are not collected when a child ends, which would take seconds.
        gc.freeze()

    def run(self, job: Job, fault: Fault | None = None, react: React | None = None) -> Attempt:
        self._port += 1
        read_end, write_end = os.pipe()
        pids = [self._start(rank, write_end, job, fault) for rank in range(self.testbed.workers)]
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
            self.testbed.enter(rank, self._port)
            self._run_child(job, fault)
        return pid

    def _run_child(self, job: Job, fault: Fault | None) -> NoReturn:
        """Runs the job; ends the process as an uncaught exception of a script would."""
        if self._quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        try:
            run((job, fault))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        sys.exit()


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
