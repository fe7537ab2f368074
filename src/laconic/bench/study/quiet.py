"""A device that several processes work on, and that one at a time may have to itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from pathlib import Path

import torch

from laconic.bench.device import wait_for


class Room:
    """Where many train, and who wants to measure waits until they have stopped between two steps.

    All of them name the same folder, whose two files are locked. Whoever goes in passes a door, and
    who waits to be alone stands in it, so that the others do not keep it waiting for ever.
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
        with _locked(self._door):
            flock(self._room, LOCK_EX)
            try:
                yield
            finally:
                wait_for(self._device)
                flock(self._room, LOCK_SH if self._inside else LOCK_UN)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    flock(file, LOCK_EX)
    try:
        yield
    finally:
        flock(file, LOCK_UN)
