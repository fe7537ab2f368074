"""How long a call takes on a device: the median of many, by its own clock where it has one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

WARM_UPS = 3
BUDGET_S = 0.25
FEWEST, MOST = 5, 200


class Stopwatch(ABC):
    """Times one call; `median_us` repeats it until the budget is spent."""

    @abstractmethod
    def once_us(self, call: Callable[[], object]) -> float: ...

    def median_us(self, call: Callable[[], object]) -> float:
        for _ in range(WARM_UPS):
            self.once_us(call)
        times: list[float] = []
        while len(times) < FEWEST or (len(times) < MOST and sum(times) < BUDGET_S * 1e6):
            times.append(self.once_us(call))
        return median(times)


class HostWatch(Stopwatch):
    """The host's clock, for CPU tensors."""

    def once_us(self, call: Callable[[], object]) -> float:
        start = perf_counter()
        call()
        return (perf_counter() - start) * 1e6


class CudaWatch(Stopwatch):
    """Events on the stream: what the host waits for in a call counts, since the GPU idles then."""

    def once_us(self, call: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaWatch() if device.type == "cuda" else HostWatch()
