"""Runs the collectives of buckets while autograd continues to compute.

Collectives must be issued in the same order on all ranks. Where a backend blocks, one thread runs
bucket after bucket in the order in which DDP delivers them. On NCCL the GPU stream keeps the order
of what is enqueued, so no thread is needed.
"""

import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import Queue
from threading import Thread
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.process_group import SHUTDOWN
from gradwire.comm.side_stream import SideStream
from gradwire.integrations.bucketing import PendingBucket

Task: TypeAlias = Callable[[], None]


class CommRunner(ABC):
    """Carries errands in order."""

    @abstractmethod
    def future(self) -> "Future[Tensor]":
        """A future that an errand can complete."""

    @abstractmethod
    def send(self, errand: Task, loads: Sequence[PendingBucket]) -> None:
        """Runs the errand, then completes the loads' futures with their buffers."""

    @abstractmethod
    def begin(self, start: Callable[[], Task], loads: Sequence[PendingBucket]) -> None:
        """The same for an errand that `start` returns, and of which only the end has to wait.

        Nothing else is sent before `arrive`.
        """

    @abstractmethod
    def arrive(self) -> None:
        """Sees to the end of all that was begun."""

    @abstractmethod
    def settle(self, last: Task) -> None:
        """Waits until nothing is under way but a last errand, and raises what went wrong."""

    @abstractmethod
    def sound(self) -> bool:
        """Whether all errands went well, so that all ranks have made the same calls."""

    @abstractmethod
    def close(self) -> None:
        """Ends; nothing may be under way."""


class OnStream(CommRunner):
    """Enqueues at once, in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)

    def future(self) -> "Future[Tensor]":
        return self._side.future()

    def send(self, errand: Task, loads: Sequence[PendingBucket]) -> None:
        with self._side.after(self._side.mark()):
            errand()
            for load in loads:
                load.future.set_result(load.buffer)

    def begin(self, start: Callable[[], Task], loads: Sequence[PendingBucket]) -> None:
        def on_the_side() -> None:
            start()()

        self.send(on_the_side, loads)

    def arrive(self) -> None:
        pass

    def settle(self, last: Task) -> None:
        self.send(last, [])

    def sound(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Item(NamedTuple):
    errand: Task
    loads: Sequence[PendingBucket]
    mark: torch.cuda.Event | None


class OnThread(CommRunner):
    """Runs errands on one thread; after a failure it runs no more.

    A future cannot carry an exception through DDP's reducer, so it is completed all the same, and
    `settle` raises at the end of the backward pass. With that the thread ends, and whoever goes on
    all the same is told the same by every `settle`.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        self._failure: Exception | None = None
        self._begun: list[_Item] = []
        self._queue: Queue[list[_Item] | None] = Queue()
        self._thread = Thread(target=self._work, name="gradwire-comm", daemon=True)
        self._thread.start()
        # A thread that comes back from C++ when Python is gone would abort the process.
        atexit.register(self._leave)

    def future(self) -> "Future[Tensor]":
        return self._side.future()

    def send(self, errand: Task, loads: Sequence[PendingBucket]) -> None:
        self._send([_Item(errand, loads, self._side.mark())])

    def begin(self, start: Callable[[], Task], loads: Sequence[PendingBucket]) -> None:
        self._begun.append(_Item(start() if self._failure is None else _nothing, loads, None))

    def arrive(self) -> None:
        # Once for all of them, since to wake a thread takes long.
        begun, self._begun = self._begun, []
        self._send(begun)

    def settle(self, last: Task) -> None:
        self.arrive()
        self._queue.join()
        # The thread is idle now, and to wake it would take longer.
        self._run([_Item(last, [], self._side.mark())])
        if self._failure is not None:
            self.close()
            raise self._failure

    def sound(self) -> bool:
        return self._failure is None

    def close(self) -> None:
        atexit.unregister(self._leave)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _leave(self) -> None:
        SHUTDOWN.set()
        self.close()

    def _work(self) -> None:
        self._side.settle()
        while (items := self._queue.get()) is not None:
            self._run(items)
            # An idle thread must not keep the last bucket alive.
            del items
            self._queue.task_done()
        self._queue.task_done()

    def _send(self, items: list[_Item]) -> None:
        if items and self._thread.is_alive():
            self._queue.put(items)
        else:
            self._run(items)

    def _run(self, items: list[_Item]) -> None:
        for item in items:
            self._run_one(item)

    def _run_one(self, item: _Item) -> None:
        with self._side.after(item.mark):
            # The order of calls is lost with the first failure, so nothing may follow it.
            if self._failure is None:
                try:
                    item.errand()
                except Exception as error:
                    self._failure = error
            for load in item.loads:
                load.future.set_result(load.buffer)


def _nothing() -> None:
    pass
