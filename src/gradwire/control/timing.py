"""Step timing: duration and breakdown of a step, by wall clock or by a model of the link."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from gradwire.comm.cost_model import LinkModel
from gradwire.comm.meter import Meter


class StepTiming(NamedTuple):
    """One step: the whole iteration of the training loop, and what of it was the exchange."""

    step_s: float
    work_s: float
    """Encoding and decoding."""
    wire_s: float
    sent_bytes: float
    waited_s: float
    """What of work and wire the training loop stood still for; the rest was hidden."""
    own_s: float = 0.0
    """What the controller itself has taken since it was last told, of the rank's processor."""


SLOTS = 16
"""Ranks tell their time on the wire apart from each other, or in so many groups."""


def told_by(lap: StepTiming, rank: int, size: int) -> list[float]:
    """What a rank tells of its lap, for `heard_of` to read in the mean over ranks."""
    slots = [0.0] * min(size, SLOTS)
    slots[rank * len(slots) // size] = lap.wire_s
    return [*lap, *slots]


def heard_of(mean: Sequence[float], size: int) -> StepTiming:
    """The mean lap, but with the time on the wire of the ranks that had to wait least for others.

    What others waited more is due to how ranks compute, whatever they say.
    """
    lap, slots = StepTiming(*mean[: len(StepTiming._fields)]), mean[len(StepTiming._fields) :]
    ranks = [0] * len(slots)
    for rank in range(size):
        ranks[rank * len(slots) // size] += 1
    least_s = min(slot * size / count for slot, count in zip(slots, ranks, strict=True))
    waited_s = lap.waited_s - (lap.wire_s - least_s)
    return lap._replace(wire_s=least_s, waited_s=max(0.0, waited_s))


class Clock(ABC):
    """Laps from step to step."""

    own_s: float = 0.0
    """What a controller has taken that was not told yet; models know of no such thing."""

    @abstractmethod
    def lap(self) -> StepTiming | None:
        """The step since it was asked before; None the first time, where nobody knows."""


class WallClock(Clock):
    """Time as it passes.

    Where a GPU carries the calls the host cannot see how long they take, and all is wire.
    """

    def __init__(self, meter: Meter, *, overlaps: bool = False, on_device: bool = False) -> None:
        self._meter, self._overlaps, self._on_device = meter, overlaps, on_device
        self._last: StepTiming | None = None

    def lap(self) -> StepTiming | None:
        meter = self._meter
        work_s = meter.encode_s + meter.decode_s
        now = StepTiming(perf_counter(), work_s, meter.wire_s, meter.sent_bytes, meter.waited_s)
        last, self._last = self._last, now
        if last is None:
            return None
        lap = StepTiming(*(after - before for after, before in zip(now, last, strict=True)))
        if self._on_device:
            return StepTiming(lap.step_s, 0.0, lap.step_s, lap.sent_bytes, lap.step_s, self.own_s)
        waited_s = lap.waited_s if self._overlaps else lap.work_s + lap.wire_s
        return lap._replace(waited_s=waited_s, own_s=self.own_s)


@dataclass
class ModelClock(Clock):
    """The time that a link would take for what was sent, so that a simulation can be repeated."""

    meter: Meter
    link: LinkModel
    compute_s: float
    """What a step takes without a network."""
    _bytes: int = 0
    _calls: int = 0

    def lap(self) -> StepTiming | None:
        sent, calls = self.meter.sent_bytes - self._bytes, self.meter.calls - self._calls
        self._bytes, self._calls = self.meter.sent_bytes, self.meter.calls
        wire_s = calls * self.link.latency_s + 8 * sent / self.link.rate_bits
        return StepTiming(self.compute_s + wire_s, 0.0, wire_s, sent, wire_s)
