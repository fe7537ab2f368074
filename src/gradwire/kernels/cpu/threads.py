"""Loops over slices of a large tensor, in torch's own OpenMP threads.

There are as many threads as torch has: one where `torchrun` starts several ranks on a host, or
where `torch.set_num_threads(1)` or `OMP_NUM_THREADS=1` is set. After an operation torch's threads
spin on their cores for some milliseconds. Other threads would compete with them for the cores, but
torch's own start on a loop at once (docs/log.md).
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

R = TypeVar("R")

SLICE = 1 << 21
"""As many entries as a thread takes at a time, at most."""

ENOUGH = 1 << 21
"""With fewer entries than this, starting threads costs more than it brings: two were measured."""

EACH = 1 << 17
"""At least so many for each of many threads, since they take the GIL one after the other."""

_HOME = os.getpid()

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def in_slices(loop: Callable[[int, int], R], size: int, unit: int = 1, effort: int = 1) -> list[R]:
    """What `loop(start, stop)` returns for each slice of `range(size)`, in their order.

    The calling thread takes part, and alone there is but one slice. So what is computed must not
    depend on where slices begin, which is at multiples of `unit`: then it has the same bits with
    any number of threads. What a loop raises is raised here, after all threads have ended. One
    that takes so many times as long as a pass over memory as `effort` says pays for fewer entries.
    """
    threads = torch.get_num_threads()
    step = _step(size, unit, effort, threads)
    start_threads = _torch_threads() if step < size else None
    # A forked process has none of the threads that OpenMP believes in, and would wait for them.
    if start_threads is None or os.getpid() != _HOME:
        return [loop(0, size)]
    share = _Share(loop, [(i, min(size, i + step)) for i in range(0, size, step)])
    start_threads(_Task(share.work), None, threads, 0)
    return share.results()


def _step(size: int, unit: int, effort: int, threads: int) -> int:
    """How long a slice is: all there is where other threads do not pay."""
    if threads == 1 or size * effort < max(ENOUGH, threads * EACH):
        return size
    # As many for one as for the other, so that all end about at once.
    count = threads * -(-size // (threads * SLICE))
    return -(-size // (count * unit)) * unit


class _Share:
    """Slices that several threads take one after the other, and what becomes of them."""

    def __init__(self, loop: Callable[[int, int], Any], slices: list[tuple[int, int]]) -> None:
        self._loop, self._slices = loop, slices
        # Each number is given out once, whoever asks: nothing else runs while a range counts on.
        self._places = iter(range(len(slices)))
        self._results: list[Any] = [None] * len(slices)
        self._errors: list[BaseException] = []

    def work(self, _: object) -> None:
        """Takes slices until there are no more; keeps what is raised, which OpenMP cannot pass."""
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
    """What torch is compiled to call where a loop is for all its threads, if that is GNU OpenMP's.

    On Linux it is; elsewhere every loop runs in the thread that calls it.
    """
    try:
        # Found in what torch is linked to. Called so, it runs without the GIL.
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except AttributeError:
        return None
    start.argtypes = _Task, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    start.restype = None
    return cast(Callable[..., None], start)
