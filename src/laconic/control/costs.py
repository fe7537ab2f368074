"""What steps would take at other settings, from the laps of those that were taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from laconic.control.clock import Lap
from laconic.control.ladder import is_whole

RECENT = 5
"""Medians are of so many laps: they bear two odd ones, and follow a link in three steps."""
ENOUGH = 3
"""So many laps at a setting have to pass before it is judged: the fewest whose median bears one."""
LEAST = 0.1
"""At least this share of the time on the wire is put down to bytes, and not to waiting: with none
there would be no reason to say less, and so nothing to learn from when the link becomes slow."""
APART = 1.5
"""Two laps tell waiting from bytes if one sends so many times as much as the other: a time that is
wrong by a twentieth then makes the bytes' share wrong by a fifth at most."""


class Said(NamedTuple):
    """What the layers say in a step, as messages of one rank."""

    whole_bytes: int
    part_bytes: int
    elements: Mapping[int, int]
    """How many elements of gradients are said at each place on the ladder."""


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

    def step_s(self, more_s: float) -> float:
        """A step whose exchange takes so much more than now.

        What is more than now is not hidden; of less, as large a share as now is.
        """
        if more_s >= 0 or self.exchange_s <= 0:
            return self.compute_s + self.waited_s + max(more_s, 0.0)
        left = max(0.0, 1 + more_s / self.exchange_s)
        return self.compute_s + self.waited_s * left


@dataclass
class Costs:
    """Plain numbers, the same on every rank."""

    whole_sent: float
    """Bytes that a rank sends for a byte of a message of 16 or 32 bits an element."""
    part_sent: float
    """The same for messages of the method."""
    recent: list[Lap] = field(default_factory=list)
    idle_s: float | None = None
    before: Lap | None = None
    """The usual lap before the last change of setting, until there are enough after it."""
    said: Said | None = None
    """In the last lap."""
    laps: int = 0
    """Since something else was said."""
    element_s: dict[int, float] = field(default_factory=dict)
    """Encoding and decoding of an element, by place on the ladder."""

    def add(self, said: Said, lap: Lap) -> None:
        """A lap in which this was said."""
        if self.said is not None and said != self.said:
            self._compare(self.said, said, lap.sent_bytes - self.recent[-1].sent_bytes)
            self.before, self.laps = _usual(self.recent), 0
        self.recent, self.said = [*self.recent, lap][-RECENT:], said
        self.laps += 1
        self._blame(said, median(lap.work_s for lap in self.recent[-self.laps :]))
        if self.laps == ENOUGH and self.before is not None:
            self._tell_apart(self.before, _usual(self.recent[-ENOUGH:]))
        if self.idle_s is not None:
            # A busy moment may have been taken for latency: no call is shorter than that.
            self.idle_s = min(self.idle_s, (1 - LEAST) * _usual(self.recent).wire_s)

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

    def work_s(self, place: int, elements: int) -> float:
        """Encoding and decoding: as it was there, or at the place most like it.

        None where all is said, until it was tried.
        """
        tried = [p for p in self.element_s if p == place or not (is_whole(p) or is_whole(place))]
        near = min(tried, key=lambda p: (abs(p - place), p), default=None)
        return 0.0 if near is None else elements * self.element_s[near]

    def _blame(self, said: Said, work_s: float) -> None:
        """Each place took as large a share of the work as was to be expected."""
        expected_s = sum(self.work_s(place, n) for place, n in said.elements.items())
        if expected_s > 0:
            found = {p: self.work_s(p, 1) * work_s / expected_s for p in said.elements}
        else:
            found = dict.fromkeys(said.elements, work_s / sum(said.elements.values()))
        self.element_s = {**self.element_s, **found}

    def _compare(self, old: Said, new: Said, sent_bytes: float) -> None:
        """Learns from a change how many bytes leave a rank for one of a message."""
        whole = new.whole_bytes - old.whole_bytes
        part = new.part_bytes - old.part_bytes
        if part and self.part_sent * abs(part) >= self.whole_sent * abs(whole):
            found = (sent_bytes - self.whole_sent * whole) / part
            self.part_sent = found if found > 0 else self.part_sent
        elif whole:
            found = (sent_bytes - self.part_sent * part) / whole
            self.whole_sent = found if found > 0 else self.whole_sent

    def _tell_apart(self, one: Lap, other: Lap) -> None:
        """Learns from two settings what of the time is due to bytes, and what is not."""
        less, more = sorted((one, other), key=lambda lap: lap.sent_bytes)
        self.before = None
        # A rank that is alone sends nothing at any setting.
        if more.sent_bytes <= APART * less.sent_bytes:
            return
        byte_s = max(0.0, more.wire_s - less.wire_s) / (more.sent_bytes - less.sent_bytes)
        new = max(0.0, less.wire_s - byte_s * less.sent_bytes)
        self.idle_s = new if self.idle_s is None else (self.idle_s + new) / 2


def _usual(laps: Sequence[Lap]) -> Lap:
    return Lap(*(median(column) for column in zip(*laps, strict=True)))
