"""Faults that a training process injects into itself, at a chosen moment of a step."""

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm.base import Collective
from gradwire.comm.process_group import Begun, ProcessGroupComm
from gradwire.engine.step import Lane, lane_rounds
from gradwire.types import Rounds

FaultKind: TypeAlias = Literal[
    "kill", "stop", "cut", "raise", "nan", "corrupt", "full-disk", "missing-files", "damaged-file"
]
Phase: TypeAlias = Literal["compute", "encode", "wire", "decode", "save"]


@dataclass(frozen=True)
class Fault:
    """A fault of rank `rank` at step `step`.

    kill: SIGKILL in `phase`; in "wire", `delay_s` after the collective began. stop, cut: the
    process is stopped, or its link is cut, for longer than the timeout, from outside. raise: a
    hook of the user's fails in the middle of backward. nan: a gradient is not finite. corrupt: a
    bit of a received message flips. full-disk: the next checkpoint cannot be written.
    missing-files, damaged-file: before the job starts, its files are moved away, or the newest one
    is damaged.
    """

    kind: FaultKind
    rank: int
    step: int
    phase: Phase = "compute"
    delay_s: float = 0.01


def emit(**facts: object) -> None:
    """Writes one JSON line in one call, so that lines of several ranks do not mix."""
    line = json.dumps({"rank": dist.get_rank(), "at_s": time.monotonic(), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def kill_self(fault: Fault) -> NoReturn:
    emit(event="fault", step=fault.step)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable: the process was killed")


class FaultInjector:
    """Triggers the fault at its step; does nothing in ranks without a fault."""

    def __init__(self, fault: Fault | None, model: nn.Module) -> None:
        self._fault = fault
        self._step = -1
        if fault is None:
            return
        if fault.kind in ("raise", "nan"):
            self._act_in_hook(fault, model)
        elif fault.kind == "corrupt":
            self._corrupt_messages(fault)
        elif fault.kind == "kill" and fault.phase in ("encode", "decode"):
            self._kill_in_lane(fault)
        elif fault.kind == "kill" and fault.phase == "wire":
            self._kill_on_wire(fault)

    def step(self, number: int) -> None:
        """Notes that training has reached this step."""
        self._step = number

    def before_backward(self) -> None:
        """Kills between the forward and the backward pass."""
        fault = self._fault
        if fault is not None and (fault.kind, fault.phase) == ("kill", "compute"):
            self._if_due(fault, lambda: kill_self(fault))

    def before_save(self) -> None:
        """Makes the next checkpoint end half-written: with a kill, or since the disk is full."""
        fault = self._fault
        if fault is None or self._step < fault.step:
            return
        if fault.kind == "full-disk":
            patch("os.fsync", _refuse_to_sync).start()
            emit(event="fault", step=fault.step)
        elif (fault.kind, fault.phase) == ("kill", "save"):

            def cut_short(descriptor: int) -> None:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                kill_self(fault)

            patch("os.fsync", cut_short).start()

    def _if_due(self, fault: Fault, act: Callable[[], None]) -> None:
        # Or later: local methods do not exchange anything at every step.
        if self._step >= fault.step:
            act()

    def _act_in_hook(self, fault: Fault, model: nn.Module) -> None:
        """Acts before the last gradients of a step, while other buckets are being exchanged."""

        def in_backward(gradient: Tensor) -> Tensor:
            if self._step < fault.step:
                return gradient
            emit(event="fault", step=fault.step)
            if fault.kind == "raise":
                raise ValueError("a mistake of the user's")
            return torch.full_like(gradient, float("nan"))

        def in_forward(_: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(in_backward)

        # A hook of a parameter would not run under FSDP, whose gradients belong to other tensors.
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        first.register_forward_hook(in_forward)

    def _kill_in_lane(self, fault: Fault) -> None:
        """Kills after the first lane of a bucket has encoded or decoded, before the others have."""

        def faulty(grad: Tensor, lane: Lane) -> Rounds:
            rounds = lane_rounds(grad, lane)
            request = next(rounds)
            if fault.phase == "encode":
                self._if_due(fault, lambda: kill_self(fault))
            while True:
                answer = yield request
                try:
                    request = rounds.send(answer)
                except StopIteration as end:
                    if fault.phase == "decode":
                        self._if_due(fault, lambda: kill_self(fault))
                    result: Tensor = end.value
                    return result

        patch("gradwire.engine.engine.lane_rounds", faulty).start()

    def _kill_on_wire(self, fault: Fault) -> None:
        """Kills in the middle of a collective, from another thread."""
        begin = ProcessGroupComm._begin

        def faulty(comm: ProcessGroupComm, collective: Collective) -> Begun:
            if self._step < fault.step:
                return begin(comm, collective)
            threading.Timer(fault.delay_s, kill_self, [fault]).start()
            works, _ = begin(comm, collective)
            for work in works:
                comm._wait(work)
            emit(event="missed", step=fault.step)
            time.sleep(60)
            raise AssertionError("unreachable: the process was killed")

        patch.object(ProcessGroupComm, "_begin", faulty).start()

    def _corrupt_messages(self, fault: Fault) -> None:
        """Flips one bit of the next rank's message, once."""
        begin = ProcessGroupComm._begin
        done: list[bool] = []

        def faulty(comm: ProcessGroupComm, collective: Collective) -> Begun:
            works, results = begin(comm, collective)
            if self._step < fault.step or done or collective.kind == "mean":
                return works, results
            done.append(True)
            return works, lambda: flipped(comm.rank, results())

        def flipped(rank: int, received: list[Tensor]) -> list[Tensor]:
            emit(event="fault", step=fault.step)
            other = received[(rank + 1) % len(received)]
            other.view(torch.uint8)[other.nbytes // 2] ^= 1
            return received

        patch.object(ProcessGroupComm, "_begin", faulty).start()


def _refuse_to_sync(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
