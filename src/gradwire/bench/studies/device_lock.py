"""A lock for a device that several processes share and one at a time may have exclusively."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

import torch

from gradwire.bench.machine import wait_for

PATIENCE_S = 1.0
AWAY_S = 3.0


class Room:
    """Where many train, and who wants to measure waits until they have stopped between two steps.

    All of them name the same folder, whose two files are locked. Whoever goes in passes a door, and
    who waits to be alone stands in it, so that the others do not keep it waiting for ever. If one
    of them is in for long, as when a step compiles kernels, it lets the rest go on for a while.
    """

    def __init__(self, folder: Path, device: str) -> None:
        # Open for as long as the process lives.
        self._door, self._room = (
            os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("door", "room")
        )
        self._device = torch.device(device)
        self._inside = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Work beside others; it is done when this ends. Work inside of it is part of it."""
        if self._inside:
            yield
            return
        with _locked(self._door):
            flock(self._room, LOCK_SH)
        self._inside = True
        try:
            yield
        finally:
            wait_for(self._device)
            self._inside = False
            flock(self._room, LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work that nobody disturbs, in the midst of shared work or not."""
        if self._inside:
            wait_for(self._device)
            flock(self._room, LOCK_UN)
        self._empty()
        try:
            yield
        finally:
            wait_for(self._device)
            flock(self._room, LOCK_SH if self._inside else LOCK_UN)
            flock(self._door, LOCK_UN)

    def _empty(self) -> None:
        """Returns with the room and its door locked."""
        while True:
            flock(self._door, LOCK_EX)
            if _taken(self._room, PATIENCE_S):
                return
            flock(self._door, LOCK_UN)
            time.sleep(AWAY_S)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    flock(file, LOCK_EX)
    try:
        yield
    finally:
        flock(file, LOCK_UN)


def _taken(file: int, patience_s: float) -> bool:
    """Whether the file could be locked within so many seconds."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        else:
            return True
