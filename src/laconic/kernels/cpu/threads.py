"""Loops that run over slices of their entries in a few threads, where there are many entries.

As many threads as torch has: one where `torchrun` starts several ranks on a host, or wherever
`torch.set_num_threads(1)` or `OMP_NUM_THREADS=1` says so. Python's threads suffice, since compiled
loops hold no GIL; those of OpenMP, which Numba would take, abort in a forked process.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from typing import TypeVar, cast

import torch

R = TypeVar("R")

SLICE = 1 << 18
"""About as many entries as a thread takes at a time."""

ENOUGH = 1 << 19
"""With fewer entries than this, waking up another thread costs more than it brings."""


def in_slices(loop: Callable[[int, int], R], size: int, unit: int = 1) -> list[R]:
    """What `loop(start, stop)` returns for each slice of `range(size)`, in their order.

    The calling thread takes part, and alone there is but one slice. So what is computed must not
    depend on where slices begin, which is at multiples of `unit`: then it has the same bits with
    any number of threads. What a loop raises is raised here, after all threads have ended.
    """
    threads = torch.get_num_threads()
    if threads == 1 or size < ENOUGH:
        return [loop(0, size)]
    step = max(1, SLICE // unit) * unit
    return _shared(loop, [(i, min(size, i + step)) for i in range(0, size, step)], threads)


def _shared(loop: Callable[[int, int], R], slices: list[tuple[int, int]], threads: int) -> list[R]:
    results: list[R | None] = [None] * len(slices)
    # Each number is given out once, whoever asks: that step of a range is one of the GIL's.
    places = iter(range(len(slices)))

    def work() -> None:
        for place in places:
            results[place] = loop(*slices[place])

    helpers = _started(work, min(threads, len(slices)) - 1)
    try:
        work()
    finally:
        # Who has not begun would find nothing to do; the others still write.
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()
    return cast(list[R], results)


def _started(work: Callable[[], None], count: int) -> list[Future[None]]:
    helpers: list[Future[None]] = []
    # None can be had any more while the interpreter shuts down; the caller then works alone.
    with suppress(RuntimeError):
        for _ in range(count):
            helpers.append(_pool(os.getpid(), count).submit(work))
    return helpers


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: those of its parent do not live in a forked one."""
    return ThreadPoolExecutor(threads, "laconic-kernels")
