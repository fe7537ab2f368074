"""A small process that kills workers after their launcher was killed.

The kernel's own mechanism, a signal at the death of the parent, is bound to the thread that started
a worker, and the threads that enter a namespace to start one are short-lived.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


class Keeper:
    """Kills the process groups it was told to watch as soon as this process is gone."""

    def __init__(self) -> None:
        # This file alone, without the package: it starts in milliseconds.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """To be called before a process is waited for: then its number may be given out again."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        """Ends; what is still watched is killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        # Whoever kills the keeper is left without one, but with workers that go on.
        with suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)


def _keep(lines: Iterable[str]) -> None:
    """Reads until the launcher closes the pipe, which the kernel does for one that is killed."""
    watched: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line[0] == "+":
            watched.add(pid)
        else:
            watched.discard(pid)
    for pid in watched:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _keep(sys.stdin)
