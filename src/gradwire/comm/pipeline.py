"""Runs several programs at once: one encodes while another is on the wire and a third decodes.

All ranks must start collectives in the same order, whichever of them is faster. So the order is a
function of the programs' numbers and rounds alone, never of time: after the first round of program
b come the second of b - 1, the third of b - 2 and so on (what HiPress calls CaSync).

Whether a program has another round shows only in its next request, so the next program would
have to wait for its last message. The number of rounds of the program at the same place in the
last step is taken instead; it is the same on all ranks. A round that it does not have is started
when all programs are run to their ends.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter, sleep

from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.process_group import PendingCollective, ProcessGroupComm, StagedCollective
from gradwire.comm.profiler_ranges import profiler_range

POLL_INTERVAL_S = 5e-5
"""Interval at which a GPU is asked whether a message has been copied to the host."""


MOST_UNDER_WAY = 4
"""Programs whose messages may be on the wire at once, which bounds the memory for them."""


class Pipeline:
    """The programs under way, oldest first; used by one thread at a time."""

    def __init__(self, comm: ProcessGroupComm) -> None:
        self._comm = comm
        self._running: deque[_RunningProgram] = deque()
        self._added: list[_RunningProgram] = []
        """The programs since the last call of `drain`."""
        self._rounds: list[int] = []
        """The number of rounds of those before."""

    def is_idle(self) -> bool:
        return not self._running

    def add(self, program: CollectiveProgram[None], done: Callable[[], None]) -> None:
        """Starts a program, and the next round of all others; `done` is called at its end."""
        number, before = len(self._added), list(self._running)
        rounds = self._rounds[number] if number < len(self._rounds) else None
        running = _RunningProgram(program, done, self._comm, rounds)
        self._running.append(running)
        self._added.append(running)
        running.begin()
        self._start(running)
        self._next_rounds([earlier for earlier in before if not earlier.is_in_last_round()])
        if number >= MOST_UNDER_WAY:
            self._added[number - MOST_UNDER_WAY].receive()
            self._drop_ended()

    def drain(self) -> None:
        """Runs all programs to their ends; called at the same point on all ranks."""
        while self._running:
            earlier = [running for running in self._running if not running.is_in_last_round()]
            # Nothing follows a last round, so those are decoded as they arrive: oldest first.
            self._next_rounds(earlier or list(reversed(self._running)))
        self._rounds = [running.started for running in self._added]
        self._added.clear()

    def work_ahead(self) -> None:
        """Decodes what has arrived; starts no collective, so it may be called at any time."""
        self._receive_arrived()
        self._drop_ended()

    def abandon(self) -> None:
        """Closes all programs, after an error."""
        for running in self._running:
            running.program.close()
        self._running.clear()
        self._added.clear()

    def _next_rounds(self, programs: list["_RunningProgram"]) -> None:
        for running in reversed(programs):
            running.receive()
            self._start(running)
        self._drop_ended()

    def _start(self, running: "_RunningProgram") -> None:
        """Starts the program's next collective; decodes what arrives until a GPU has encoded it."""
        while not running.is_ready():
            self._receive_arrived()
            sleep(POLL_INTERVAL_S)
        running.start()

    def _receive_arrived(self) -> None:
        for running in self._running:
            if running.has_arrived():
                running.receive()

    def _drop_ended(self) -> None:
        ended = [running for running in self._running if running.has_ended]
        self._running = deque(running for running in self._running if not running.has_ended)
        for running in ended:
            running.done()


class _RunningProgram:
    """One program: it computes, has a collective to start, or waits for one."""

    def __init__(
        self,
        program: CollectiveProgram[None],
        done: Callable[[], None],
        comm: ProcessGroupComm,
        rounds: int | None,
    ) -> None:
        """`rounds` is the number of rounds to expect, None if it is unknown."""
        self.program, self.done = program, done
        self.has_ended = False
        self.started = 0
        """The number of collectives that were started."""
        self._comm, self._rounds = comm, rounds
        self._next: StagedCollective | None = None
        self._pending: PendingCollective | None = None

    def begin(self) -> None:
        """Encodes the first round."""
        start_s = perf_counter()
        with profiler_range("encode"):
            self._compute(lambda: next(self.program))
        self._comm.meter.add_time(perf_counter() - start_s, 0.0, 0.0)

    def is_in_last_round(self) -> bool:
        """Returns whether no other round is expected; does not depend on what has arrived."""
        return self.started == self._rounds

    def is_ready(self) -> bool:
        """Returns whether `start` would not wait for a GPU."""
        return self._next is None or self._next.is_ready()

    def start(self) -> None:
        """Starts the collective of the round that was encoded, if the program has not ended."""
        if self._next is not None:
            with profiler_range("wire"):
                self._pending, self._next = self._comm.start(self._next), None
            self.started += 1

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
        self._comm.meter.add_time(0.0, 0.0, perf_counter() - start_s)

    def _compute(self, resume: Callable[[], Collective]) -> None:
        try:
            self._next = self._comm.stage(resume())
        except StopIteration:
            self.has_ended = True
