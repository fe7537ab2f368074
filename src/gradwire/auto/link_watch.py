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

    def __init__(self, reference_steps: int) -> None:
        self._reference_steps = reference_steps
        self.reference_s: tuple[float, float] | None = None
        """Median wire and step time at the start."""
        self.recent: list[StepTiming] = []

    def add(self, timing: StepTiming) -> None:
        self.recent = [*self.recent, timing][-REFERENCE_STEPS:]
        if self.reference_s is None and len(self.recent) >= self._reference_steps:
            self.reference_s = (_wire_s(self.recent), median(t.step_s for t in self.recent))

    def changed_wire_s(self) -> float | None:
        """Returns the new wire time if the link has changed, else None."""
        if self.reference_s is None:
            return None
        for count, factor in ((2, MUCH_CHANGED), (3, CHANGED)):
            last = self.recent[-count:]
            if len(last) == count and self._differ(last, factor):
                return _wire_s(last)
        return None

    def _differ(self, timings: Sequence[StepTiming], factor: float) -> bool:
        assert self.reference_s is not None
        wire_s, step_s = self.reference_s
        slower = all(t.wire_s > max(factor * wire_s, wire_s + SHARE * step_s) for t in timings)
        faster = all(t.wire_s < min(wire_s / factor, wire_s - SHARE * step_s) for t in timings)
        return slower or faster


def _wire_s(timings: Sequence[StepTiming]) -> float:
    return median(t.wire_s for t in timings)
