"""SIGKILL at a chosen moment of a training step, from within the process that it hits."""

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
class Doom:
    """Rank `rank` is killed in `phase` of step `step`; on the wire `delay_s` after that began.

    In the phase "hook" it is not killed: a hook of the user's raises in the middle of backward.
    """

    rank: int
    step: int
    phase: str
    delay_s: float = 0.01


def tell(**facts: object) -> None:
    """Writes one line at once, so that lines of several ranks do not mix."""
    line = json.dumps({"rank": int(os.environ["RANK"]), "at_s": time.monotonic(), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def die(doom: Doom) -> NoReturn:
    tell(event="killed", step=doom.step, phase=doom.phase)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody lives here")


class Death:
    """Waits for its step and phase in a process that is doomed; does nothing in others."""

    def __init__(self, doom: Doom | None, model: nn.Module, link: gradwire.Link) -> None:
        self._doom = doom
        self._step = -1
        if doom is not None and doom.phase == "hook":
            self._in_a_hook(doom, model)
        if doom is not None and doom.phase in ("encode", "decode"):
            self._in_a_lane(doom)
        elif doom is not None and doom.phase == "wire":
            self._on_the_wire(doom, link)

    def step(self, number: int) -> None:
        """Training has come to this step."""
        self._step = number

    def computing(self) -> None:
        """Between the forward and the backward pass."""
        if self._doom is not None and self._doom.phase == "compute" and self._due(self._doom):
            die(self._doom)

    def saving(self) -> None:
        """Before a checkpoint is written: of the next one only half will be."""
        doom = self._doom
        if doom is None or doom.phase != "save" or self._step < doom.step:
            return

        def cut_short(fd: int) -> None:
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
            die(doom)

        os.fsync = cut_short

    def _due(self, doom: Doom) -> bool:
        return self._step == doom.step

    def _in_a_hook(self, doom: Doom, model: nn.Module) -> None:
        """At the gradient that comes last, when other buckets are on their way."""

        def fail(_: Tensor) -> None:
            if self._due(doom):
                raise ValueError("a mistake of the user's")

        next(model.parameters()).register_hook(fail)

    def _in_a_lane(self, doom: Doom) -> None:
        """After the first lane of a bucket has encoded or decoded, before the others have."""
        exchange = gradwire.engine.engine.exchange

        def doomed(grad: Tensor, lane: Lane) -> Rounds:
            talk = exchange(grad, lane)
            request = next(talk)
            if doom.phase == "encode" and self._due(doom):
                die(doom)
            while True:
                answer = yield request
                try:
                    request = talk.send(answer)
                except StopIteration as end:
                    if doom.phase == "decode" and self._due(doom):
                        die(doom)
                    return end.value

        gradwire.engine.engine.exchange = doomed

    def _on_the_wire(self, doom: Doom, link: gradwire.Link) -> None:
        """In the middle of a collective, from another thread."""
        answer = link._comm.answer

        def doomed(call: Collective) -> list[Tensor]:
            if not self._due(doom):
                return answer(call)
            threading.Timer(doom.delay_s, die, [doom]).start()
            answer(call)
            tell(event="missed", step=doom.step)
            time.sleep(60)
            raise AssertionError("nobody lives here")

        link._comm.answer = doomed  # type: ignore[method-assign]
