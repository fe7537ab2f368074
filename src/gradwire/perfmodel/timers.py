"""Timers of host and GPU work that exclude other load, and eviction of CPU caches before timing."""

from abc import ABC, abstractmethod
from time import thread_time

import torch


class Clock(ABC):
    """Takes marks; the seconds between two of them are known when all is done."""

    @abstractmethod
    def mark(self) -> int:
        """The number of a new mark, here and now."""

    @abstractmethod
    def seconds(self, start: int, stop: int) -> float:
        """Work between two marks."""


class HostClock(Clock):
    """This thread's time on a processor: what others do meanwhile does not count."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> int:
        self._marks.append(thread_time())
        return len(self._marks) - 1

    def seconds(self, start: int, stop: int) -> float:
        return self._marks[stop] - self._marks[start]


class CudaClock(Clock):
    """Events on the current stream; while it waits for the host, time passes too."""

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
"""More than the caches of a processor hold for one worker."""


class Cold:
    """Takes from a processor's caches what they have; on other devices nothing is done."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._other = torch.zeros(CACHE_BYTES, dtype=torch.uint8) if on_cpu else None

    def cool(self) -> None:
        if self._other is not None:
            self._other.add_(1)
