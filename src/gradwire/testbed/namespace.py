"""Anonymous network namespaces, which the kernel removes with their last user.

A named namespace (`ip netns`) is a mount that outlives its creator. These are kept alive by a file
descriptor of this process and by the workers inside, so even SIGKILL leaves nothing behind, and
testbeds cannot collide.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


@dataclass(frozen=True)
class Namespace:
    """A network namespace, alive until `close` and until the last process inside has ended."""

    fd: int

    @staticmethod
    def create() -> "Namespace":
        """Creates an empty namespace; raises PermissionError without CAP_SYS_ADMIN."""
        return Namespace(_in_thread(_unshare))

    @property
    def path(self) -> str:
        """The path for other programs while this process lives, such as `nsenter --net=PATH`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` inside and returns its result; processes and sockets it creates stay inside.

        Only a separate thread enters, so the caller's thread never changes its namespace.
        """
        return _in_thread(lambda: self._enter_and(work))

    def enter(self) -> None:
        """Moves the calling thread inside permanently, for use in a newly forked process."""
        # Python has os.setns only from 3.12 on.
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.setns(self.fd, _CLONE_NEWNET), "setns")

    def close(self) -> None:
        os.close(self.fd)

    def _enter_and(self, work: Callable[[], T]) -> T:
        self.enter()
        return work()


def _in_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


def _unshare() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
