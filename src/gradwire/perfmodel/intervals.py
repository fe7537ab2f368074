"""Intervals of medians and of their ratios, by resampling: measured times are noisy and skewed."""

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

_RESAMPLES = 400
_TAIL = 0.05
"""The share of resampled values that is left out at each end."""


class Interval(NamedTuple):
    """A value, and the range in which nine of ten repetitions would put it."""

    value: float
    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high

    def format(self, unit: str = "", scale: float = 1.0, digits: int = 3) -> str:
        """Returns a text such as "12.1 ms (11.8 to 12.9)"."""
        value, low, high = (f"{scale * number:.{digits}g}" for number in self)
        return f"{value}{unit} ({low} to {high})"


def median_interval(samples: Sequence[float]) -> Interval:
    """Returns the median of some samples with its interval."""
    return _interval(median(samples), lambda random: _resampled(samples, random))


def difference_interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the difference of two medians with its interval."""
    return _interval(
        median(one) - median(other),
        lambda random: _resampled(one, random) - _resampled(other, random),
    )


def ratio_interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the ratio of two medians of positive samples with its interval."""
    return _interval(
        median(one) / median(other),
        lambda random: _resampled(one, random) / _resampled(other, random),
    )


def _resampled(samples: Sequence[float], random: Random) -> float:
    return median(random.choices(samples, k=len(samples)))


def _interval(value: float, draw: Callable[[Random], float]) -> Interval:
    random = Random(0)
    drawn = sorted(draw(random) for _ in range(_RESAMPLES))
    cut = round(_TAIL * _RESAMPLES)
    return Interval(value, min(value, drawn[cut]), max(value, drawn[-1 - cut]))
