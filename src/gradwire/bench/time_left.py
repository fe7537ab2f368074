"""Estimates the time that is left of a long measurement, from the share that is done."""

import time
from collections.abc import Callable

from gradwire.bench import human


class TimeLeft:
    """A clock that starts when it is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start_s = clock, clock()

    def words(self, done: float, total: float, limit_s: float | None = None) -> str:
        """Returns ", about 3 min left"; "" at the start and at the end.

        What remains is taken to be as slow as what is done, and to end at `limit_s` at the latest.
        """
        passed_s = self._clock() - self._start_s
        if not 0 < done < total:
            return ""
        left_s = passed_s / done * (total - done)
        if limit_s is not None:
            left_s = max(0.0, min(left_s, limit_s - passed_s))
        return f", about {human.duration_s(left_s)} left"
