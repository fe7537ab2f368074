"""Kills the own process with SIGKILL at a chosen moment of a training step."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor, nn

import gradwire
import gradwire.engine.engine
from gradwire.comm.base import Collective
from gradwire.engine.step import Lane
from gradwire.types import Rounds

PHASES = ("compute", "encode", "wire", "decode", "save")


@dataclass(frozen=True)
class Fault:
    """Kills rank `rank` in `phase` of step `step`; in "wire", `delay_s` after the collective began.

    In the phase "hook" it is not killed: a hook of the user raises in the middle of backward.
    """

    rank: int
    step: int
    phase: str
    delay_s: float = 0.01


def emit(**facts: object) -> None:
    """Writes one JSON line in one call, so that lines of several ranks do not mix."""
    line = json.dumps({"rank": int(os.environ["RANK"]), "at_s": time.monotonic(), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def kill_self(fault: Fault) -> NoReturn:
    emit(event="killed", step=fault.step, phase=fault.phase)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable: the process was killed")


class FaultInjector:
    """Triggers the fault at its step and phase; does nothing in ranks without a fault."""

    def __init__(self, fault: Fault | None, model: nn.Module, link: gradwire.Link) -> None:
        self._fault = fault
        self._step = -1
        if fault is not None and fault.phase == "hook":
            self._fail_in_hook(fault, model)
        if fault is not None and fault.phase in ("encode", "decode"):
            self._kill_in_lane(fault)
        elif fault is not None and fault.phase == "wire":
            self._kill_on_wire(fault, link)

    def step(self, number: int) -> None:
        """Notes that training has reached this step."""
        self._step = number

    def before_backward(self) -> None:
        """Kills between the forward and the backward pass."""
        if self._fault is not None and self._fault.phase == "compute" and self._due(self._fault):
            kill_self(self._fault)

    def before_save(self) -> None:
        """Makes the next checkpoint end half-written, with a kill."""
        fault = self._fault
        if fault is None or fault.phase != "save" or self._step < fault.step:
            return

        def cut_short(fd: int) -> None:
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
            kill_self(fault)

        os.fsync = cut_short

    def _due(self, fault: Fault) -> bool:
        return self._step == fault.step

    def _fail_in_hook(self, fault: Fault, model: nn.Module) -> None:
        """Raises at the last gradient, while other buckets are being exchanged."""

        def fail(_: Tensor) -> None:
            if self._due(fault):
                raise ValueError("a mistake of the user's")

        next(model.parameters()).register_hook(fail)

    def _kill_in_lane(self, fault: Fault) -> None:
        """Kills after the first lane of a bucket has encoded or decoded, before the others have."""
        lane_rounds = gradwire.engine.engine.lane_rounds

        def faulty(grad: Tensor, lane: Lane) -> Rounds:
            rounds = lane_rounds(grad, lane)
            request = next(rounds)
            if fault.phase == "encode" and self._due(fault):
                kill_self(fault)
            while True:
                answer = yield request
                try:
                    request = rounds.send(answer)
                except StopIteration as end:
                    if fault.phase == "decode" and self._due(fault):
                        kill_self(fault)
                    return end.value

        gradwire.engine.engine.lane_rounds = faulty

    def _kill_on_wire(self, fault: Fault, link: gradwire.Link) -> None:
        """Kills in the middle of a collective, from another thread."""
        run = link._comm.run

        def faulty(collective: Collective) -> list[Tensor]:
            if not self._due(fault):
                return run(collective)
            threading.Timer(fault.delay_s, kill_self, [fault]).start()
            run(collective)
            emit(event="missed", step=fault.step)
            time.sleep(60)
            raise AssertionError("unreachable: the process was killed")

        link._comm.run = faulty  # type: ignore[method-assign]
