"""Real ranks for tests: processes that run the functions they are sent."""

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deadlines import scaled

TIMEOUT_S = 58
PR_SET_PDEATHSIG = 1


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    # A stopped process would not notice that the tests were killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=scaled(TIMEOUT_S - 15))
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def as_torchrun() -> None:
    """Sets the environment variables of this rank that trainers read, as torchrun would."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests", OMP_NUM_THREADS="1")


def _call(module: str, name: str, *args: object) -> Any:
    return getattr(import_module(module), name)(*args)


class Jobs:
    """The functions of a module that only ranks import, since its packages take seconds to load."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_call, self._module, name)


class Ranks:
    """N processes in one gloo group. A failure ends them all; the next job starts new ones.

    They are stopped between jobs, or gloo would wake them a hundred times a second. Modules that
    take seconds to import may be preloaded once for all of them.
    """

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._preload = list(preload)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(scaled(10))
        self._kill()

    def run(
        self, function: Callable[..., Any], *args: object, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the results by rank."""
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        limit_s = scaled(timeout_s)
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            answers = [pipe.recv() if pipe.poll(limit_s) else None for pipe in self._pipes]
        except BaseException:
            # Ranks that are still busy would answer the next job with the result of this one.
            self._kill()
            raise
        wrong = {rank: a for rank, a in enumerate(answers) if a is None or not a[0]}
        if wrong:
            self._kill()
            texts = [f"rank {r}: {'no answer' if a is None else a[1]}" for r, a in wrong.items()]
            raise RankFailed("\n".join(texts))
        self._signal(signal.SIGSTOP)
        return [answer[1] for answer in answers if answer is not None]

    def _start(self) -> None:
        context = mp.get_context("forkserver" if self._preload else "spawn")
        if self._preload:
            context.set_forkserver_preload(self._preload)
        port = free_port()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, port, there), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(here)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
