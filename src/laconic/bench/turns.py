"""Runs the turns of a job on a cluster; a case that fails does not take the others with it."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from laconic.bench.job import Job, write_job
from laconic.bench.messages import Failed, Finished, Message, Started, hear
from laconic.errors import PeerError
from laconic.network.cluster import Cluster

_TAIL_LINES = 5

Listen = Callable[[Message], None]


def run_turns(cluster: Cluster, job: Job, listen: Listen) -> None:
    """Runs every turn once, and tells `listen` what the workers say.

    A case that fails loses its remaining turns; new workers then take those of the others.
    """
    left = list(job.turns)
    while left:
        launch = _Launch(listen)
        code = launch.run(cluster, replace(job, turns=tuple(left)))
        if launch.finished == len(left):
            return
        if not launch.started:
            raise PeerError(f"the workers ended with code {code} before a turn: {launch.tail()}")
        failed = left[launch.finished]
        error = launch.error or f"the workers ended with code {code}: {launch.tail()}"
        listen(Failed(case=failed, error=error))
        left = [case for case in left[launch.finished :] if case != failed]


class _Launch:
    """One set of workers, and what they have told so far."""

    def __init__(self, listen: Listen) -> None:
        self.started = False
        self.finished = 0
        self.error: str | None = None
        self._listen = listen
        self._errors: deque[str] = deque(maxlen=_TAIL_LINES)

    def run(self, cluster: Cluster, job: Job) -> int:
        with TemporaryDirectory(prefix="laconic-") as folder:
            path = Path(folder) / "job.json"
            write_job(path, job)
            command = [sys.executable, "-m", "laconic.bench.worker", "--config", str(path)]
            return cluster.launch(command, on_line=self._hear, on_error_line=self._hear_error)

    def tail(self) -> str:
        return " ".join(self._errors) or "no error message"

    def _hear(self, rank: int, line: str) -> None:
        message = hear(line)
        if isinstance(message, Failed):
            # The first to fail knows why; the others only know that it is gone.
            self.error = self.error or f"rank {rank}: {message.error}"
            return
        self.started = self.started or isinstance(message, Started)
        self.finished += isinstance(message, Finished)
        if message is not None:
            self._listen(message)

    def _hear_error(self, rank: int, line: str) -> None:
        self._errors.append(f"rank {rank}: {line}")
