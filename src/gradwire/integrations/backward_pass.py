"""Detects whether a backward pass is under way in which gradients are exchanged.

autograd reports when a graph task ends, but not when one raises, and a backward pass may consist of
several: checkpointing with `use_reentrant=True` runs one inside another for every block.
"""

from collections.abc import Callable
from threading import get_ident
from weakref import ref

import torch

at_end_of_backward: Callable[[Callable[[], None]], None]
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the current graph task ends without an error."""


def graph_task() -> int | None:
    """Returns the number of the graph task that runs in this thread, if one does."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


class _EndOfTask:
    """A callback that only the graph task refers to, so that it is freed when the task ends."""

    def __init__(self, owner: "BackwardPass") -> None:
        self._owner = ref(owner)

    def __call__(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner._task_completed = True


class BackwardPass:
    """The backward pass whose gradients are being exchanged, from its first bucket to its end."""

    def __init__(self) -> None:
        self.has_begun = False
        """True until `end` is called, even if the pass was interrupted by an exception."""
        self._thread = 0
        self._task: int | None = None
        self._task_completed = False
        self._end_of_task: ref[_EndOfTask] | None = None

    def note_bucket(self) -> None:
        """Notes that a bucket is handed over, in the current graph task."""
        task = graph_task()
        if not self.has_begun or task != self._task:
            self._thread, self._task, self._task_completed = get_ident(), task, False
            self._end_of_task = None
            if task is not None:
                callback = _EndOfTask(self)
                self._end_of_task = ref(callback)
                at_end_of_backward(callback)
        self.has_begun = True

    def end(self) -> None:
        self.has_begun = False

    def is_running(self) -> bool:
        """Returns whether a backward pass runs in this thread, or the noted one in any thread."""
        if graph_task() is not None:
            return True
        return self.has_begun and not self._was_interrupted()

    def _was_interrupted(self) -> bool:
        """Returns whether the pass is known to have ended by an exception.

        The thread that handed over its buckets is out of it, or its graph task was freed before it
        was completed. A task that was completed may be one of several.
        """
        if self._thread == get_ident():
            return True
        if self._end_of_task is None or self._task_completed:
            return False
        return self._end_of_task() is None
