"""What steps would take at other settings, from the laps of those that were taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from laconic.control.clock import Lap

RECENT = 5
"""Medians are of so many laps: they bear two odd ones, and follow a link in three steps."""
ENOUGH = 3
"""So many laps at a setting have to pass before it is judged."""
LEAST = 0.1
"""At least this share of the time on the wire is put down to bytes, and not to waiting."""


class Link(NamedTuple):
    """How steps go now. The exchange takes `idle_s` (latency, and waiting for slower ranks)
    whatever is said, and `byte_s` for each byte."""

    compute_s: float
    """What of a step is not the exchange."""
    exchange_s: float
    waited_s: float
    """What of the exchange is not hidden behind the computation."""
    idle_s: float
    byte_s: float

    def step_s(self, work_s: float, sent_bytes: float) -> float:
        """A step with so much encoding and decoding, and so many bytes.

        What is more than now is not hidden; of less, as large a share as now is.
        """
        then_s = work_s + self.idle_s + self.byte_s * sent_bytes
        if then_s >= self.exchange_s:
            return self.compute_s + self.waited_s + then_s - self.exchange_s
        return self.compute_s + self.waited_s * then_s / self.exchange_s


@dataclass
class Costs:
    """Plain numbers, the same on every rank."""

    recent: list[Lap] = field(default_factory=list)
    idle_s: float | None = None
    before: Lap | None = None
    """The usual lap before the last change of setting, until there are enough after it."""
    laps: int = 0
    """Since then."""
    work_s: dict[int, list[float]] = field(default_factory=dict)
    """Of the last laps at each setting, by its place on the ladder."""
    sent_bytes: dict[int, float] = field(default_factory=dict)

    def add(self, place: int, lap: Lap) -> None:
        """A lap at the setting at this place."""
        self.recent = [*self.recent, lap][-RECENT:]
        self.laps += 1
        self.work_s[place] = [*self.work_s.get(place, []), lap.work_s][-RECENT:]
        self.sent_bytes[place] = lap.sent_bytes
        if self.laps == ENOUGH and self.before is not None:
            self._tell_apart(self.before, _usual(self.recent[-ENOUGH:]))
        if self.idle_s is not None:
            # A busy moment may have been taken for latency: no call is shorter than that.
            self.idle_s = min(self.idle_s, (1 - LEAST) * _usual(self.recent).wire_s)

    def change(self) -> None:
        """The next laps are at another setting."""
        self.before, self.laps = _usual(self.recent), 0

    @property
    def enough(self) -> bool:
        return self.laps >= ENOUGH

    def link(self) -> Link:
        """As the last laps were."""
        now = _usual(self.recent)
        idle_s = self.idle_s or 0.0
        byte_s = median(
            max(lap.wire_s - idle_s, LEAST * lap.wire_s) / max(lap.sent_bytes, 1.0)
            for lap in self.recent
        )
        compute_s = median(max(lap.step_s - lap.waited_s, 0.0) for lap in self.recent)
        return Link(compute_s, now.work_s + now.wire_s, now.waited_s, idle_s, byte_s)

    def _tell_apart(self, one: Lap, other: Lap) -> None:
        """Learns from two settings what of the time is due to bytes, and what is not."""
        less, more = sorted((one, other), key=lambda lap: lap.sent_bytes)
        self.before = None
        if more.sent_bytes < 1.2 * less.sent_bytes:
            return
        byte_s = max(0.0, more.wire_s - less.wire_s) / (more.sent_bytes - less.sent_bytes)
        new = max(0.0, less.wire_s - byte_s * less.sent_bytes)
        self.idle_s = new if self.idle_s is None else (self.idle_s + new) / 2


def _usual(laps: Sequence[Lap]) -> Lap:
    return Lap(*(median(column) for column in zip(*laps, strict=True)))
