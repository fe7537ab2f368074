"""Launches the workers of a job on a cluster; a case that fails does not stop the others."""

import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gradwire.bench.worker.protocol import (
    Failed,
    Finished,
    Job,
    Message,
    Started,
    parse_message,
    write_job,
)
from gradwire.errors import PeerError
from gradwire.testbed.cluster import Cluster

_TAIL_LINES = 5
_TRIES = 3
# A shell adds this to the number of the signal that killed a process.
_SIGNALLED = 128

OnMessage = Callable[[Message], None]


def run_cases(cluster: Cluster, job: Job, on_message: OnMessage) -> None:
    """Runs `job.case_order`, and passes the messages of the workers to `on_message`.

    A case that fails is not run again; new workers then run the remaining cases, in the time that
    is left.
    """
    left = list(job.case_order)
    start_s = time.monotonic()
    while left:
        budget_s = job.budget_s
        if budget_s is not None:
            budget_s = max(0.0, budget_s - (time.monotonic() - start_s))
        rest = replace(job, case_order=tuple(left), budget_s=budget_s)
        launch = _launched(cluster, rest, on_message)
        if launch.finished == len(left):
            return
        failed = left[launch.finished]
        on_message(Failed(case=failed, error=launch.why()))
        left = [case for case in left[launch.finished :] if case != failed]


def _launched(cluster: Cluster, job: Job, on_message: OnMessage) -> "_Launch":
    """Starts workers until they have begun a case; retries if the port was taken meanwhile."""
    for _ in range(_TRIES):
        launch = _Launch(on_message)
        launch.run(cluster, job)
        if launch.started:
            return launch
        if not launch.port_taken():
            raise PeerError(
                f"the workers ended with code {launch.code} before a case: {launch.tail()}"
            )
    raise PeerError(f"the rendezvous port was in use, {_TRIES} times: {launch.tail()}")


class _Launch:
    """One set of workers, and the messages and errors that they have sent so far."""

    def __init__(self, on_message: OnMessage) -> None:
        self.code = 0
        self.started = False
        self.finished = 0
        self._on_message = on_message
        self._first: tuple[int, str] | None = None
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))

    def run(self, cluster: Cluster, job: Job) -> None:
        with TemporaryDirectory(prefix="gradwire-") as folder:
            path = Path(folder) / "job.json"
            write_job(path, job)
            own = [] if cluster.interface is None else ["--interface", cluster.interface]
            worker = [sys.executable, "-m", "gradwire.bench.worker", *own]
            command = [*worker, "--config", str(path)]
            self.code = cluster.launch(
                command, on_line=self._on_line, on_error_line=self._on_error_line
            )

    def why(self) -> str:
        """Describes why the workers ended, with the last lines of the rank that failed first."""
        if self._first is None:
            return f"the workers ended {_with(self.code)}:\n{self.tail()}"
        rank, error = self._first
        # A killed worker cannot report it; the others only report that it is missing.
        killed = f"a worker ended {_with(self.code)}; " if self.code > _SIGNALLED else ""
        return "\n".join([f"{killed}rank {rank}: {error}", *self._errors[rank]])

    def tail(self) -> str:
        lines = [f"rank {rank}: {line}" for rank, tail in self._errors.items() for line in tail]
        return "\n".join(lines) or "no error message"

    def port_taken(self) -> bool:
        return "EADDRINUSE" in self.tail()

    def _on_line(self, rank: int, line: str) -> None:
        message = parse_message(line)
        if isinstance(message, Failed):
            # The first failure is the cause; the other ranks only notice a missing peer.
            self._first = self._first or (rank, message.error)
            return
        self.started = self.started or isinstance(message, Started)
        self.finished += isinstance(message, Finished)
        if message is not None:
            self._on_message(message)

    def _on_error_line(self, rank: int, line: str) -> None:
        self._errors[rank].append(line)


def _with(code: int) -> str:
    try:
        return f"by {signal.Signals(code - _SIGNALLED).name}"
    except ValueError:
        return f"with code {code}"
