"""Predicts how long a call takes at a size, from calls at smaller sizes.

A call cannot be stopped, so one that would take hours must not begin.
"""

import math
from collections.abc import Callable

_FACTOR = 4
"""Between one size and the next."""
_PROBES = 3
"""The last one is at a sixteenth of the size."""
_LEAST = 2**14
"""Smaller sizes show the cost of a call, not how it grows."""
_STEEPEST = 2.0
"""The largest exponent; a decomposition of a square matrix has 1.5."""
_PROBE_SHARE = 0.25
"""A probe is not run if it alone would take this share of the limit."""


def probe_sizes(numel: int) -> list[int]:
    """Returns the sizes to try before `numel`, smallest first; none if it is small itself."""
    sizes = [numel // _FACTOR ** (power + 1) for power in range(_PROBES, 0, -1)]
    return [size for size in sizes if size >= _LEAST]


def predicted_s(numel: int, time_s: Callable[[int], float], limit_s: float) -> float:
    """Returns the seconds that a call at `numel` is expected to take, or 0 if too short.

    `time_s` runs the call at a size. Probes end as soon as one would take too long.
    """
    known: list[tuple[int, float]] = []
    for size in probe_sizes(numel):
        if known and _extrapolated(known, size) > _PROBE_SHARE * limit_s:
            break
        known.append((size, time_s(size)))
    return _extrapolated(known, numel) if known else 0.0


def _extrapolated(known: list[tuple[int, float]], size: int) -> float:
    """Continues the power law of the last two sizes; a method that looks sublinear is linear."""
    last_size, last_s = known[-1]
    exponent = 1.0
    if len(known) > 1 and min(last_s, known[-2][1]) > 0:
        before_size, before_s = known[-2]
        exponent = math.log(last_s / before_s) / math.log(last_size / before_size)
    return last_s * math.pow(size / last_size, min(_STEEPEST, max(1.0, exponent)))
