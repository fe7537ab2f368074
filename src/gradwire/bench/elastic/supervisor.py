"""Starts, kills and restarts replicas, and collects what they report.

They are forked from a process that has loaded torch, torchft and kernels, so they start quickly.
"""

import multiprocessing as mp
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import print_exc
from typing import Any

from gradwire.bench.elastic.replica import Replica, Report, Step, run

JOIN_TIMEOUT_MS, HEARTBEAT_TIMEOUT_MS, TICK_MS = 2000, 1000, 100


@dataclass
class _Child:
    process: ForkServerProcess
    pipe: Connection
    errors: Path


@dataclass
class Supervisor:
    """A Lighthouse, and replicas by their number; all end with the context."""

    case: str
    ended: list[str] = field(default_factory=list)
    """The last words of replicas that ended by themselves."""
    _children: dict[int, _Child] = field(default_factory=dict)

    def __enter__(self) -> "Supervisor":
        self._context: ForkServerContext = mp.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["gradwire.bench.elastic.preload", "gradwire.bench.elastic.replica"]
        )
        self._folder = TemporaryDirectory(prefix="gradwire-elastic-")
        here, there = self._context.Pipe()
        self._lighthouse = self._start("lighthouse", _serve_quorums, there)
        self.address: str = here.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._children]:
            self.kill(number)
        self._lighthouse.kill()
        self._lighthouse.join()
        self._folder.cleanup()

    def start(self, number: int, **changes: Any) -> None:
        """Starts a replica; `changes` are settings in which it differs from the others."""
        settings: dict[str, Any] = {"case": self.case, **changes}
        replica = Replica(number=number, lighthouse=self.address, **settings)
        here, there = self._context.Pipe(duplex=False)
        process = self._start(f"replica{number}", _train, replica, there)
        self._children[number] = _Child(process, here, self._errors(f"replica{number}"))

    def alive(self) -> list[int]:
        return sorted(self._children)

    def kill(self, number: int) -> float:
        """Ends a replica without warning; returns the moment."""
        child = self._children.pop(number)
        assert child.process.pid is not None
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(child.process.pid, signal.SIGKILL)
        now_s = time.monotonic()
        child.process.join()
        child.pipe.close()
        return now_s

    def steps(self, limit_s: float) -> Iterator[Step]:
        """Yields the steps of all replicas until the limit."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            pipes = {child.pipe: number for number, child in self._children.items()}
            if not pipes:
                time.sleep(left_s)
            for pipe in wait([*pipes], left_s):
                assert isinstance(pipe, Connection)
                if pipe.closed:
                    continue
                try:
                    yield pipe.recv()
                except EOFError:
                    self._note_end(pipes[pipe])

    def _note_end(self, number: int) -> None:
        child = self._children.pop(number)
        child.process.join()
        written = child.errors.read_text(errors="replace")
        named = re.findall(r"^[\w.]+Error\b.*", written, re.M)
        text = f"replica {number}: exit code {child.process.exitcode} {' '.join(named[-1:])}"
        self.ended.append(text.rstrip())

    def _start(self, name: str, target: Callable[..., None], *args: object) -> ForkServerProcess:
        arguments = (str(self._errors(name)), target, *args)
        process = self._context.Process(target=_quietly, args=arguments, daemon=True)
        process.start()
        pipe = args[-1]
        assert isinstance(pipe, Connection)
        pipe.close()
        return process

    def _errors(self, name: str) -> Path:
        return Path(self._folder.name) / name


def _quietly(errors: str, target: Callable[..., None], *args: object) -> None:
    """Calls a function with what is printed in a file; ends without waiting for any thread."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        target(*args)
    except BaseException:
        print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _train(replica: Replica, pipe: Connection) -> None:
    report: Report = pipe.send
    run(replica, report)


def _serve_quorums(pipe: Connection) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    pipe.send(server.address())
    signal.pause()
