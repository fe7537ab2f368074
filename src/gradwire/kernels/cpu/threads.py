"""Loops over slices of a large tensor, in torch's own OpenMP threads.

There are as many threads as torch has: one where `torchrun` starts several ranks on a host, or
where `torch.set_num_threads(1)` or `OMP_NUM_THREADS=1` is set. After an operation torch's threads
spin on their cores for some milliseconds. Other threads would compete with them for the cores, but
torch's own start on a loop at once (docs/results/log.md).
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

R = TypeVar("R")

SLICE = 1 << 21
"""Most entries that a thread takes at a time."""

ENOUGH = 1 << 21
"""With fewer entries, starting threads costs more than it saves (measured with two)."""

EACH = 1 << 17
"""Least entries per thread if there are many, since they take the GIL one after the other."""

_HOME = os.getpid()

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def in_slices(loop: Callable[[int, int], R], size: int, unit: int = 1, effort: int = 1) -> list[R]:
    """Calls `loop(start, stop)` for all slices of `range(size)`; returns its results in order.

    The calling thread takes part; without others there is one slice. Slices begin at multiples of
    `unit`, and results must not depend on where: then they have the same bits with any number of
    threads. An exception of a loop is raised here, after all threads have ended. `effort` is the
    time of the loop relative to a pass over memory: with more, threads pay for fewer entries.
    """
    threads = torch.get_num_threads()
    if threads == 1 or size * effort < max(ENOUGH, threads * EACH):
        return [loop(0, size)]
    # Equal shares, so that all threads end at about the same time.
    count = threads * -(-size // (threads * SLICE))
    step = -(-size // (count * unit)) * unit
    start_threads = _torch_threads()
    # A forked process lacks the threads that OpenMP believes to have, and would wait forever.
    if step >= size or start_threads is None or os.getpid() != _HOME:
        return [loop(0, size)]
    queue = _SliceQueue(loop, [(i, min(size, i + step)) for i in range(0, size, step)])
    start_threads(_Task(queue.work), None, threads, 0)
    return queue.results()


class _SliceQueue:
    """Slices that several threads take one after the other, and their results."""

    def __init__(self, loop: Callable[[int, int], Any], slices: list[tuple[int, int]]) -> None:
        self._loop, self._slices = loop, slices
        # Thread-safe: the GIL makes each step of a range iterator atomic.
        self._places = iter(range(len(slices)))
        self._results: list[Any] = [None] * len(slices)
        self._errors: list[BaseException] = []

    def work(self, _: object) -> None:
        """Takes slices until there are none; keeps exceptions, which OpenMP cannot pass on."""
        try:
            for place in self._places:
                self._results[place] = self._loop(*self._slices[place])
        except BaseException as error:
            self._errors.append(error)

    def results(self) -> list[Any]:
        if self._errors:
            raise self._errors[0]
        return self._results


@cache
def _torch_threads() -> Callable[..., None] | None:
    """Returns GNU OpenMP's entry point for parallel loops, if torch is linked to it.

    That is so on Linux; elsewhere every loop runs in the thread that calls it.
    """
    try:
        # Found in the libraries that torch is linked to; ctypes releases the GIL for the call.
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except AttributeError:
        return None
    start.argtypes = _Task, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    start.restype = None
    return cast(Callable[..., None], start)
