"""Processes of an asynchronous method that a test stops, kills and restarts."""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from local_workers import plain_sgd, small_model, take_step

from deadlines import scaled
from gradwire.errors import PeerError
from gradwire.local import AsyncQsparseLocalSGD, RejoinedWorker
from processes import PR_SET_PDEATHSIG, free_port

WAIT_S = 30


class End(NamedTuple):
    """How a worker's training ended."""

    took_s: float
    """Seconds to leave the context, or from the last finished step to the error."""
    error: str | None
    stats: dict[str, Any]
    log: list[str]
    last_loss: float


def _train(pipe: Connection, rank: int, size: int, port: int, timeout_s: float, new: bool) -> None:
    """Takes steps until the test ends them; answers its questions in between."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    group = None
    if new:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        group = RejoinedWorker(rank, size, store)
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=scaled(WAIT_S)),
        )
    model = small_model()
    optimizer = plain_sgd(model)
    worker = AsyncQsparseLocalSGD(
        *(model, optimizer, "topk:ratio=0.1"),
        sync_every=2,
        timeout_s=timeout_s,
        process_group=group,
    )
    error, loss, step, ending = None, float("nan"), 0, False
    last = time.monotonic()
    try:
        with worker:
            pipe.send("entered")
            while not ending:
                if pipe.poll():
                    ending = pipe.recv() == "end"
                    if not ending:
                        alive = worker.workers() if rank == 0 else None
                        pipe.send({**worker.stats(), "loss": loss, "alive": alive})
                loss = take_step(model, optimizer, step, rank)
                step, last = step + 1, time.monotonic()
                time.sleep(0.005)
    except PeerError as caught:
        error = str(caught)
    pipe.send(End(time.monotonic() - last, error, worker.stats(), lines, loss))


class AsyncProcesses:
    """Workers that train until they are told to end, each in a process of its own."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["gradwire.local"])
        self.size, self.timeout_s, self._port = size, timeout_s, free_port()
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> "AsyncProcesses":
        for rank in range(self.size):
            self._start(rank, new=False)
        for rank in range(self.size):
            assert self._receive(rank) == "entered"
        for rank in range(self.size):
            # The first sync loads or compiles kernels, which may take longer than the timeout.
            self.wait_for(lambda stats: stats["syncs"] >= 3, rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[rank].pid, number)

    def rejoin(self, rank: int) -> None:
        """Starts a new process in the place of one that has been killed."""
        self._processes[rank].join()
        self._start(rank, new=True)
        assert self._receive(rank) == "entered"

    def stats(self, rank: int) -> dict[str, Any]:
        self._pipes[rank].send("stats")
        answer: dict[str, Any] = self._receive(rank)
        return answer

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], rank: int = 0) -> float:
        """Returns the seconds until a worker's statistics satisfy the condition."""
        start = time.monotonic()
        while not condition(self.stats(rank)):
            assert time.monotonic() - start < scaled(WAIT_S)
            time.sleep(0.02)
        return time.monotonic() - start

    def ask_to_end(self, *ranks: int) -> None:
        for rank in ranks:
            self._pipes[rank].send("end")

    def end_of(self, rank: int) -> End:
        end: End = self._receive(rank)
        return end

    def _start(self, rank: int, *, new: bool) -> None:
        here, there = self._context.Pipe()
        args = (there, rank, self.size, self._port, self.timeout_s, new)
        process = self._context.Process(target=_train, args=args, daemon=True)
        process.start()
        there.close()
        self._processes[rank], self._pipes[rank] = process, here

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(scaled(WAIT_S)), f"worker {rank} does not answer"
        return self._pipes[rank].recv()
