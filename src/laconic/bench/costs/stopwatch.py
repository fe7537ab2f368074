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
    """Times calls one after the other; `median_us` does so until the budget is spent."""

    row_us: float
    """Short calls are timed in rows that take about so long, and cost their share of it."""

    @abstractmethod
    def once_us(self, call: Callable[[], object], times: int) -> float:
        """What each of so many calls takes."""

    def median_us(self, call: Callable[[], object]) -> float:
        one_us = min(self.once_us(call, 1) for _ in range(WARM_UPS))
        times = max(1, min(MOST, int(self.row_us / max(one_us, 1e-3))))
        costs: list[float] = []
        while len(costs) < FEWEST or (len(costs) < MOST and sum(costs) * times < BUDGET_S * 1e6):
            costs.append(self.once_us(call, times))
        return median(costs)


class HostWatch(Stopwatch):
    """The host's clock, for CPU tensors."""

    row_us = 0.0

    def once_us(self, call: Callable[[], object], times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - start) * 1e6 / times


class CudaWatch(Stopwatch):
    """Events on the stream: what the host waits for in a call counts, since the GPU idles then.

    In a row the host runs ahead, so that starting the first call is not taken for its work.
    """

    row_us = 1000.0

    def once_us(self, call: Callable[[], object], times: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / times


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaWatch() if device.type == "cuda" else HostWatch()
