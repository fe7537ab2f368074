"""Notices that a link has changed, from the wire times of a method that stays the same."""

from collections.abc import Sequence
from statistics import median

from gradwire.control.timing import StepTiming

REFERENCE_STEPS = 5
"""Timings of a method that changes are compared with."""
CHANGED, MUCH_CHANGED = 1.5, 3.0
"""Factors from which a link counts as changed after three timings in a row, or after two."""
SHARE = 0.1
"""A change counts only if it is at least this share of a step."""


class LinkWatch:
    """Compares the last wire times with those at the start."""

    def __init__(self, reference_steps: int, expected_s: tuple[float, float] | None = None) -> None:
        """`expected_s` are wire and step time of earlier steps of the method."""
        self._reference_steps = reference_steps
        self.expected_s = expected_s
        self.reference_s: tuple[float, float] | None = None
        """Median wire and step time at the start."""
        self.recent: list[StepTiming] = []

    def add(self, timing: StepTiming) -> None:
        self.recent = [*self.recent, timing][-REFERENCE_STEPS:]
        enough = len(self.recent) >= self._reference_steps
        if self.reference_s is None and enough and not self._have_fallen(1):
            self.reference_s = (_wire_s(self.recent), median(t.step_s for t in self.recent))

    def changed_wire_s(self) -> float | None:
        """Returns the new wire time if the link has changed, else None."""
        if self.reference_s is None:
            return _wire_s(self.recent[-2:]) if self._have_fallen(2) else None
        for count, factor in ((2, MUCH_CHANGED), (3, CHANGED)):
            last = self.recent[-count:]
            if len(last) == count and self._differ(last, factor, self.reference_s):
                return _wire_s(last)
        return None

    @property
    def is_suspicious(self) -> bool:
        """True if the last timing was one of a changed link, and the next ones have to confirm."""
        known_s = self.reference_s or self.expected_s
        if known_s is None or not self.recent:
            return False
        return self._differ(self.recent[-1:], CHANGED, known_s)

    def _have_fallen(self, count: int) -> bool:
        """Returns whether the last steps were much slower than those before there was a reference.

        Those were few, and the first of them slow, so they show nothing else.
        """
        last = self.recent[-count:]
        if self.expected_s is None or len(last) < count:
            return False
        is_slower = last[0].wire_s > self.expected_s[0]
        return is_slower and self._differ(last, MUCH_CHANGED, self.expected_s)

    def _differ(
        self, timings: Sequence[StepTiming], factor: float, known_s: tuple[float, float]
    ) -> bool:
        wire_s, step_s = known_s
        slower = all(t.wire_s > max(factor * wire_s, wire_s + SHARE * step_s) for t in timings)
        faster = all(t.wire_s < min(wire_s / factor, wire_s - SHARE * step_s) for t in timings)
        return slower or faster


def _wire_s(timings: Sequence[StepTiming]) -> float:
    return median(t.wire_s for t in timings)
