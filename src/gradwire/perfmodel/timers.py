"""Timers of host and GPU work that exclude other load, and eviction of CPU caches before timing."""

from abc import ABC, abstractmethod
from time import thread_time

import torch


class Clock(ABC):
    """Takes marks; the seconds between two of them are known when all work is done."""

    @abstractmethod
    def mark(self) -> int:
        """Takes a mark now and returns its number."""

    @abstractmethod
    def seconds(self, start: int, stop: int) -> float:
        """Returns the working time between two marks."""


class HostClock(Clock):
    """Measures the CPU time of this thread, so that other load does not count."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> int:
        self._marks.append(thread_time())
        return len(self._marks) - 1

    def seconds(self, start: int, stop: int) -> float:
        return self._marks[stop] - self._marks[start]


class CudaClock(Clock):
    """Measures with events on the current stream; time in which it waits for the host counts."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> int:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)
        return len(self._marks) - 1

    def seconds(self, start: int, stop: int) -> float:
        self._marks[stop].synchronize()
        return float(self._marks[start].elapsed_time(self._marks[stop])) / 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


CACHE_BYTES = 64 << 20
"""More than a processor's caches hold for one worker."""


class CacheEvictor:
    """Evicts the caches of a CPU; does nothing on other devices."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._other = torch.zeros(CACHE_BYTES, dtype=torch.uint8) if on_cpu else None

    def evict(self) -> None:
        if self._other is not None:
            self._other.add_(1)
