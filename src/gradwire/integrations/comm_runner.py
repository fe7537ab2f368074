"""Communication runners: exchange buckets while autograd goes on computing.

All ranks must issue collectives in the same order. On a backend whose collectives block, one thread
runs bucket after bucket in the order in which DDP hands them over. On NCCL the stream keeps the
order of what is enqueued, and nothing blocks.
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
    """Runs communication tasks in order."""

    @abstractmethod
    def future(self) -> "Future[Tensor]":
        """Returns a future that a task can complete."""

    @abstractmethod
    def submit(self, task: Task, buckets: Sequence[PendingBucket]) -> None:
        """Runs the task, then completes the futures of the buckets."""

    @abstractmethod
    def start(self, begin: Callable[[], Task], buckets: Sequence[PendingBucket]) -> None:
        """Calls `begin` now, and runs the task that it returns later, to wait for completion.

        Nothing else is submitted before `flush`.
        """

    @abstractmethod
    def flush(self) -> None:
        """Completes everything that was started."""

    @abstractmethod
    def end_step(self, last: Task) -> None:
        """Waits for all tasks, runs a last one, and raises the first error of any of them."""

    @abstractmethod
    def has_failed(self) -> bool:
        """Returns whether a task failed, so that ranks may have made different collectives."""

    @abstractmethod
    def close(self) -> None:
        """Ends the runner; no task may be under way."""


class StreamRunner(CommRunner):
    """Enqueues work on a side stream, in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)

    def future(self) -> "Future[Tensor]":
        return self._side.future()

    def submit(self, task: Task, buckets: Sequence[PendingBucket]) -> None:
        with self._side.after(self._side.record_event()):
            task()
            for bucket in buckets:
                bucket.future.set_result(bucket.buffer)

    def start(self, begin: Callable[[], Task], buckets: Sequence[PendingBucket]) -> None:
        def run() -> None:
            task = begin()
            task()

        self.submit(run, buckets)

    def flush(self) -> None:
        pass

    def end_step(self, last: Task) -> None:
        self.submit(last, [])

    def has_failed(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _Item(NamedTuple):
    task: Task
    buckets: Sequence[PendingBucket]
    event: torch.cuda.Event | None


class ThreadRunner(CommRunner):
    """Runs tasks on one thread, and none after a failure.

    A future cannot carry an exception through DDP's reducer, so it is completed all the same, and
    `end_step` raises at the end of the backward pass. Then the thread ends, and every later
    `end_step` raises the same error.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        self._failure: Exception | None = None
        self._started: list[_Item] = []
        self._queue: Queue[list[_Item] | None] = Queue()
        self._thread = Thread(target=self._work, name="gradwire-comm", daemon=True)
        self._thread.start()
        # A thread that returns from C++ after Python has ended would abort the process.
        atexit.register(self._shut_down)

    def future(self) -> "Future[Tensor]":
        return self._side.future()

    def submit(self, task: Task, buckets: Sequence[PendingBucket]) -> None:
        self._put([_Item(task, buckets, self._side.record_event())])

    def start(self, begin: Callable[[], Task], buckets: Sequence[PendingBucket]) -> None:
        task = begin() if self._failure is None else _nothing
        self._started.append(_Item(task, buckets, None))

    def flush(self) -> None:
        # Once for all of them, since waking a thread is slow.
        started, self._started = self._started, []
        self._put(started)

    def end_step(self, last: Task) -> None:
        if self._started:
            self.flush()
        self._queue.join()
        # The thread is idle now; waking it would take longer than running the task here.
        self._run([_Item(last, [], self._side.record_event())])
        if self._failure is not None:
            self.close()
            raise self._failure

    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        atexit.unregister(self._shut_down)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _shut_down(self) -> None:
        SHUTDOWN.set()
        self.close()

    def _work(self) -> None:
        self._side.configure_thread()
        while (items := self._queue.get()) is not None:
            self._run(items)
            # An idle thread must not keep the last bucket alive.
            del items
            self._queue.task_done()
        self._queue.task_done()

    def _put(self, items: list[_Item]) -> None:
        if items and self._thread.is_alive():
            self._queue.put(items)
        else:
            self._run(items)

    def _run(self, items: list[_Item]) -> None:
        for item in items:
            with self._side.after(item.event):
                # The order of collectives is lost with the first failure, so none may follow it.
                if self._failure is None:
                    try:
                        item.task()
                    except Exception as error:
                        self._failure = error
                for bucket in item.buckets:
                    bucket.future.set_result(bucket.buffer)


def _nothing() -> None:
    pass
