"""Divides the time of a job over blocks of steps, so that a slow case takes fewer steps.

All blocks that are left may take equally long; what fast ones do not need is for the slow ones.
All ranks take the numbers of rank 0, since they must take equal numbers of steps.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
import torch.distributed as dist

from gradwire.bench.worker.protocol import Job

_WARM_UP_SHARE = 1 / 3


def from_rank_0(value: int) -> int:
    """Returns the value of rank 0; called on all ranks."""
    agreed = torch.tensor(value)
    dist.broadcast(agreed, src=0)
    return int(agreed)


class TimeBudget:
    """Decides how many steps a block takes: those asked, or as many as fit, at least one period.

    The first block of a case always has its full warm-up, in which kernels are compiled and some
    methods start dense. Steps that one block leaves out are asked of the next ones of the case.
    """

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[int], int] = from_rank_0,
    ) -> None:
        self._warmup, self._clock, self._agree = job.warmup, clock, agree
        self._end_s = None if job.budget_s is None else clock() + job.budget_s
        self._blocks = Counter(job.case_order)
        self._asked = {case: blocks * job.steps for case, blocks in self._blocks.items()}
        self._step_s: dict[str, float] = {}
        self._block_end_s = 0.0

    def begin_block(self) -> None:
        """Gives the block that begins its share; sessions that it makes first count too."""
        if self._end_s is not None:
            now_s = self._clock()
            needs_s = [self._need_s(case) for case in self._blocks.elements()]
            self._block_end_s = now_s + equal_share(self._end_s - now_s, needs_s)

    def warm_ups(self, case: str, period: int) -> int:
        """Returns the number of periods of the block's warm-up."""
        known_s = self._step_s.get(case)
        if self._end_s is None or known_s is None or self._warmup == 0:
            return self._warmup
        fits = self._fitting(_WARM_UP_SHARE, period * known_s)
        return self._agree(max(1, min(self._warmup, fits)))

    def steps(self, case: str, period: int, warm_up_s: Sequence[float]) -> int:
        """Returns the number of timed steps, in whole periods, given the times of the warm-up."""
        asked = whole_periods(-(-self._asked[case] // self._blocks[case]), period)
        if self._end_s is None:
            return asked
        recent_s = fmean(warm_up_s[-period:]) if warm_up_s else self._step_s.get(case)
        # Without any step so far, a single period shows how long they are.
        fits = 1 if recent_s is None else self._fitting(1, period * recent_s)
        return self._agree(max(period, min(asked, fits * period)))

    def end_block(self, case: str, steps_ms: Sequence[float]) -> None:
        self._step_s[case] = fmean(steps_ms) / 1e3
        share = -(-self._asked[case] // self._blocks[case])
        self._asked[case] -= min(share, len(steps_ms))
        self._blocks[case] -= 1

    def _need_s(self, case: str) -> float:
        """Returns the time of a whole block of the case; infinite before its first block."""
        steps = self._warmup + self._asked[case] / self._blocks[case]
        return steps * self._step_s.get(case, math.inf)

    def _fitting(self, share: float, each_s: float) -> int:
        """Returns how many times `each_s` fits into a share of what is left of the block."""
        return max(0, int(share * (self._block_end_s - self._clock()) / max(each_s, 1e-9)))


def equal_share(total: float, needs: Sequence[float]) -> float:
    """Returns the largest share such that all get theirs, or less if they need less, in total."""
    share = math.inf
    for index, need in enumerate(sorted(needs)):
        share = max(0.0, total) / (len(needs) - index)
        if need > share:
            return share
        total -= need
    return share


def whole_periods(steps: int, period: int) -> int:
    """Rounds a number of steps up to whole periods."""
    return -(-steps // period) * period
