"""A small process that kills workers whose launcher was killed.

The kernel's own mechanism, a signal at the death of the parent, is bound to the thread that started
a worker, and the threads that enter a namespace to start one are short-lived.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


class Watchdog:
    """Kills the process groups that it watches as soon as this process has ended."""

    def __init__(self) -> None:
        # Runs this file without importing the package, so it starts in milliseconds.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        self._write(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Must be called before a process is waited for, since its id may be reused after that."""
        self._write(f"-{pid}")

    def close(self) -> None:
        """Ends the watchdog; process groups that are still watched are killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        # If the watchdog itself was killed, the workers go on without one.
        with suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)


def _watch(lines: Iterable[str]) -> None:
    """Reads until the launcher closes the pipe, which the kernel also does for a killed one."""
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
    _watch(sys.stdin)
