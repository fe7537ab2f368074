"""Runs worker processes that start and end together, and streams their output by line."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, NamedTuple, TypeAlias

from gradwire.testbed.watchdog import Watchdog

Process: TypeAlias = "subprocess.Popen[str]"
OnLine: TypeAlias = Callable[[int, str], None]

GRACE_S = 5.0
# For lines still in the pipes once every worker has ended; a grandchild may hold a pipe open.
_DRAIN_S = 1.0
_STREAMS_PER_WORKER = 2


class _Line(NamedTuple):
    rank: int
    text: str
    report: OnLine


class _StreamClosed(NamedTuple):
    rank: int


class _Exited(NamedTuple):
    rank: int


class _Interrupted(NamedTuple):
    signal_number: int


_Event: TypeAlias = _Line | _StreamClosed | _Exited | _Interrupted


def run_together(
    starts: Sequence[Callable[[], Process]], on_line: OnLine, on_error_line: OnLine
) -> int:
    """Runs one process per start to its end; returns 0, or the first exit code that was not 0.

    The first failure ends the others: SIGTERM to their process groups, SIGKILL after `GRACE_S`.
    SIGINT and SIGTERM to this process do the same and then raise KeyboardInterrupt; if it is
    killed by SIGKILL, a watchdog ends the workers. The callbacks run in the calling thread, one
    line of stdout or stderr at a time.
    """
    events: SimpleQueue[_Event] = SimpleQueue()
    workers = _Workers(events)
    with _interrupts_as_events(events):
        try:
            for start in starts:
                workers.add(start(), on_line, on_error_line)
            workers.watch()
        finally:
            workers.kill()
            workers.close()
    if workers.interrupted:
        raise KeyboardInterrupt
    return workers.code


def spawn(command: Sequence[str], env: dict[str, str]) -> Process:
    """Starts `command` in its own session, so that a signal reaches its children too."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


class _Workers:
    """The processes of one launch. Threads only report events; this thread decides and signals."""

    def __init__(self, events: SimpleQueue[_Event]) -> None:
        self.code = 0
        self.interrupted = False
        self._events = events
        self._processes: list[Process] = []
        self._running: set[int] = set()
        self._open_streams = 0
        self._deadline_s: float | None = None
        self._watchdog = Watchdog()

    def add(self, process: Process, on_line: OnLine, on_error_line: OnLine) -> None:
        rank = len(self._processes)
        self._processes.append(process)
        self._watchdog.watch(process.pid)
        self._running.add(rank)
        self._open_streams += _STREAMS_PER_WORKER
        assert process.stdout is not None
        assert process.stderr is not None
        self._start_thread(_read_lines, rank, process.stdout, on_line)
        self._start_thread(_read_lines, rank, process.stderr, on_error_line)
        self._start_thread(_await_exit, rank, process.pid)

    def watch(self) -> None:
        while self._running or self._open_streams:
            event = self._next_event()
            if event is None and not self._running:
                return
            self._handle(event)

    def kill(self) -> None:
        for rank in tuple(self._running):
            self._reap(rank)

    def close(self) -> None:
        self._watchdog.close()

    def _start_thread(self, work: Callable[..., None], *details: object) -> None:
        threading.Thread(target=work, args=(self._events, *details), daemon=True).start()

    def _next_event(self) -> _Event | None:
        """Returns the next event; None when the deadline passes first."""
        wait_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
        try:
            return self._events.get(timeout=wait_s)
        except Empty:
            return None

    def _handle(self, event: _Event | None) -> None:
        match event:
            case _Line(rank, text, report):
                report(rank, text)
            case _StreamClosed():
                self._open_streams -= 1
            case _Exited(rank) if rank in self._running:
                self._note_exit(self._reap(rank))
            case _Interrupted():
                # A second Ctrl-C kills without a grace period.
                self._end_all(0.0 if self.interrupted else GRACE_S)
                self.interrupted = True
            case None:
                self.kill()

    def _note_exit(self, code: int) -> None:
        if code != 0 and self.code == 0 and not self.interrupted:
            self.code = code
            self._end_all(GRACE_S)

    def _end_all(self, grace_s: float) -> None:
        if not self._running:
            return
        for rank in self._running:
            _signal_group(self._processes[rank].pid, signal.SIGTERM)
        self._deadline_s = time.monotonic() + grace_s

    def _reap(self, rank: int) -> int:
        """Kills the rest of a worker's process group; returns its exit code as a shell would."""
        process = self._processes[rank]
        # Before the wait, until which the kernel does not reuse the process id.
        _signal_group(process.pid, signal.SIGKILL)
        self._watchdog.forget(process.pid)
        code = process.wait()
        self._running.discard(rank)
        if not self._running:
            self._deadline_s = time.monotonic() + _DRAIN_S
        return code if code >= 0 else 128 - code


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _read_lines(events: SimpleQueue[_Event], rank: int, stream: IO[str], report: OnLine) -> None:
    with stream:
        for line in stream:
            events.put(_Line(rank, line.rstrip("\n"), report))
    events.put(_StreamClosed(rank))


def _await_exit(events: SimpleQueue[_Event], rank: int, pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        events.put(_Exited(rank))


@contextmanager
def _interrupts_as_events(events: SimpleQueue[_Event]) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into events, so that none raises while workers are being started.

    Only the main thread may set handlers; others change nothing. An ignored signal stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def report(number: int, frame: FrameType | None) -> None:
        events.put(_Interrupted(number))

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, report)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
