"""A lock for a device that several processes share and one at a time may have exclusively."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

import torch

from gradwire.bench.machine import wait_for

WAIT_S = 1.0
RETRY_S = 3.0


class DeviceLock:
    """A shared lock for training; to measure, a process waits until all others are between steps.

    All processes name the same folder, whose two files are locked. A process takes the turnstile
    before the lock, and one that waits for exclusive access holds the turnstile, so that the others
    do not starve it. If one of them holds the lock for long, as when a step compiles kernels, the
    waiting process releases the turnstile for a while.
    """

    def __init__(self, folder: Path, device: str) -> None:
        # The files stay open as long as the process lives.
        self._turnstile, self._lock = (
            os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("turnstile", "lock")
        )
        self._device = torch.device(device)
        self._holds_shared = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock with others, until the device's work is done; reentrant."""
        if self._holds_shared:
            yield
            return
        with _locked(self._turnstile):
            flock(self._lock, LOCK_SH)
        self._holds_shared = True
        try:
            yield
        finally:
            wait_for(self._device)
            self._holds_shared = False
            flock(self._lock, LOCK_UN)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock exclusively; a shared hold of this process is released meanwhile."""
        if self._holds_shared:
            wait_for(self._device)
            flock(self._lock, LOCK_UN)
        self._acquire_exclusive()
        try:
            yield
        finally:
            wait_for(self._device)
            flock(self._lock, LOCK_SH if self._holds_shared else LOCK_UN)
            flock(self._turnstile, LOCK_UN)

    def _acquire_exclusive(self) -> None:
        """Locks both files exclusively."""
        while True:
            flock(self._turnstile, LOCK_EX)
            if _try_lock(self._lock, WAIT_S):
                return
            flock(self._turnstile, LOCK_UN)
            time.sleep(RETRY_S)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    flock(file, LOCK_EX)
    try:
        yield
    finally:
        flock(file, LOCK_UN)


def _try_lock(file: int, wait_s: float) -> bool:
    """Returns True if the file could be locked within `wait_s` seconds."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        else:
            return True
