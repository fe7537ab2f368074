"""Launches the workers of a job on a cluster; a case that fails does not stop the others."""

import signal
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gradwire.bench.worker.protocol import Failed, Finished, Job, Message, Started, hear, write_job
from gradwire.errors import PeerError
from gradwire.testbed.cluster import Cluster

_TAIL_LINES = 5
_TRIES = 3
# A shell adds this to the number of the signal that ended a process.
_SIGNALLED = 128

Listen = Callable[[Message], None]


def run_turns(cluster: Cluster, job: Job, listen: Listen) -> None:
    """Runs every turn once, and tells `listen` what the workers say.

    A case that fails loses its remaining turns; new workers then take those of the others.
    """
    left = list(job.turns)
    while left:
        launch = _launched(cluster, replace(job, turns=tuple(left)), listen)
        if launch.finished == len(left):
            return
        failed = left[launch.finished]
        listen(Failed(case=failed, error=launch.why()))
        left = [case for case in left[launch.finished :] if case != failed]


def _launched(cluster: Cluster, job: Job, listen: Listen) -> "_Launch":
    """Workers that have begun a turn; a port that somebody else was faster to take costs a try."""
    for _ in range(_TRIES):
        launch = _Launch(listen)
        launch.run(cluster, job)
        if launch.started:
            return launch
        if not launch.port_taken():
            raise PeerError(
                f"the workers ended with code {launch.code} before a turn: {launch.tail()}"
            )
    raise PeerError(f"the port where workers meet was in use, {_TRIES} times: {launch.tail()}")


class _Launch:
    """One set of workers, and what they have told so far."""

    def __init__(self, listen: Listen) -> None:
        self.code = 0
        self.started = False
        self.finished = 0
        self._listen = listen
        self._first: tuple[int, str] | None = None
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))

    def run(self, cluster: Cluster, job: Job) -> None:
        with TemporaryDirectory(prefix="gradwire-") as folder:
            path = Path(folder) / "job.json"
            write_job(path, job)
            own = [] if cluster.interface is None else ["--interface", cluster.interface]
            worker = [sys.executable, "-m", "gradwire.bench.worker.__main__", *own]
            command = [*worker, "--config", str(path)]
            self.code = cluster.launch(command, on_line=self._hear, on_error_line=self._hear_error)

    def why(self) -> str:
        """What ended the workers, and the last lines of the one that knows."""
        if self._first is None:
            return f"the workers ended {_with(self.code)}:\n{self.tail()}"
        rank, error = self._first
        # Whoever was killed cannot say so, and those who can only miss it.
        killed = f"a worker ended {_with(self.code)}; " if self.code > _SIGNALLED else ""
        return "\n".join([f"{killed}rank {rank}: {error}", *self._errors[rank]])

    def tail(self) -> str:
        lines = [f"rank {rank}: {line}" for rank, said in self._errors.items() for line in said]
        return "\n".join(lines) or "no error message"

    def port_taken(self) -> bool:
        return "EADDRINUSE" in self.tail()

    def _hear(self, rank: int, line: str) -> None:
        message = hear(line)
        if isinstance(message, Failed):
            # The first to fail knows why; the others only know that it is gone.
            self._first = self._first or (rank, message.error)
            return
        self.started = self.started or isinstance(message, Started)
        self.finished += isinstance(message, Finished)
        if message is not None:
            self._listen(message)

    def _hear_error(self, rank: int, line: str) -> None:
        self._errors[rank].append(line)


def _with(code: int) -> str:
    try:
        return f"by {signal.Signals(code - _SIGNALLED).name}"
    except ValueError:
        return f"with code {code}"
