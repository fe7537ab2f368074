"""Runs several programs at once: one encodes while another is on the wire and a third decodes.

All ranks must start collectives in the same order, whichever of them is faster. So the order is a
function of the programs' numbers and rounds alone, never of time: after the first round of program
b come the second of b - 1, the third of b - 2 and so on (what HiPress calls CaSync).
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import PendingCollective, ProcessGroupComm
from gradwire.comm.profiler_ranges import profiler_range


class Pipeline:
    """The programs under way, oldest first; used by one thread at a time."""

    def __init__(self, comm: ProcessGroupComm) -> None:
        self._comm = comm
        self._running: deque[_RunningProgram] = deque()

    def is_idle(self) -> bool:
        return not self._running

    def add(self, program: CollectiveProgram[None], done: Callable[[], None]) -> None:
        """Starts a program, and the next round of all others; `done` is called at its end."""
        running = _RunningProgram(program, done, self._comm.meter)
        before = list(self._running)
        self._running.append(running)
        running.begin()
        running.start(self._comm)
        self._next_rounds(before)

    def drain(self) -> None:
        """Runs all programs to their ends; called at the same point on all ranks."""
        while self._running:
            self._next_rounds(list(self._running))

    def work_ahead(self) -> None:
        """Decodes what has arrived; starts no collective, so it may be called at any time."""
        for running in self._running:
            if running.has_arrived():
                running.receive()
        self._drop_ended()

    def abandon(self) -> None:
        """Closes all programs, after an error."""
        for running in self._running:
            running.program.close()
        self._running.clear()

    def _next_rounds(self, programs: list["_RunningProgram"]) -> None:
        for running in reversed(programs):
            running.receive()
            running.start(self._comm)
        self._drop_ended()

    def _drop_ended(self) -> None:
        ended = [running for running in self._running if running.has_ended]
        self._running = deque(running for running in self._running if not running.has_ended)
        for running in ended:
            running.done()


class _RunningProgram:
    """One program: it computes, has a collective to start, or waits for one."""

    def __init__(
        self, program: CollectiveProgram[None], done: Callable[[], None], meter: Meter
    ) -> None:
        self.program, self.done = program, done
        self.has_ended = False
        self._meter = meter
        self._next: Collective | None = None
        self._pending: PendingCollective | None = None

    def begin(self) -> None:
        """Encodes the first round."""
        start_s = perf_counter()
        with profiler_range("encode"):
            self._compute(lambda: next(self.program))
        self._meter.add_time(perf_counter() - start_s, 0.0, 0.0)

    def start(self, comm: ProcessGroupComm) -> None:
        """Starts the collective of the round that was encoded, if the program has not ended."""
        if self._next is not None:
            with profiler_range("wire"):
                self._pending, self._next = comm.start(self._next), None

    def has_arrived(self) -> bool:
        return self._pending is not None and self._pending.is_completed()

    def receive(self) -> None:
        """Waits for the collective that was started, decodes, and encodes the next round."""
        if self._pending is None:
            return
        with profiler_range("wire"):
            received: list[Tensor] = self._pending.wait()
        self._pending = None
        start_s = perf_counter()
        with profiler_range("decode"):
            self._compute(lambda: self.program.send(received))
        self._meter.add_time(0.0, 0.0, perf_counter() - start_s)

    def _compute(self, resume: Callable[[], Collective]) -> None:
        try:
            self._next = resume()
        except StopIteration:
            self.has_ended = True
