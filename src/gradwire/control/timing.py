"""Step timing: duration and breakdown of a step, by wall clock or by a model of the link."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from gradwire.comm.cost_model import LinkModel
from gradwire.comm.meter import Meter


class StepTiming(NamedTuple):
    """Duration of one iteration of the training loop, and of the exchange within it."""

    step_s: float
    codec_s: float
    """Encoding and decoding."""
    wire_s: float
    sent_bytes: float
    exposed_s: float
    """Part of codec and wire time that the training loop waited for; the rest was overlapped."""
    overhead_s: float = 0.0
    """CPU time that the controller itself has taken on this rank since the last report."""


MAX_WIRE_SLOTS = 16
"""Ranks report their wire time separately up to this world size, and in so many groups beyond."""


def encode_timing(timing: StepTiming, rank: int, world_size: int) -> list[float]:
    """Returns the numbers a rank sends; `decode_timing` reads their mean over ranks."""
    slots = [0.0] * min(world_size, MAX_WIRE_SLOTS)
    slots[rank * len(slots) // world_size] = timing.wire_s
    return [*timing, *slots]


def decode_timing(mean: Sequence[float], world_size: int) -> StepTiming:
    """Returns the mean timing, with the wire time of the ranks that waited least for others.

    Longer wire times are due to differences in computation, whatever is sent.
    """
    timing, slots = StepTiming(*mean[: len(StepTiming._fields)]), mean[len(StepTiming._fields) :]
    ranks = [0] * len(slots)
    for rank in range(world_size):
        ranks[rank * len(slots) // world_size] += 1
    least_s = min(slot * world_size / count for slot, count in zip(slots, ranks, strict=True))
    exposed_s = timing.exposed_s - (timing.wire_s - least_s)
    return timing._replace(wire_s=least_s, exposed_s=max(0.0, exposed_s))


class Clock(ABC):
    """Measures the time from step to step."""

    overhead_s: float = 0.0
    """CPU time of the controller that has not been reported yet; zero in models of a link."""

    @abstractmethod
    def step_timing(self) -> StepTiming | None:
        """Returns the timing since the last call; None at the first call of a wall clock."""


class WallClock(Clock):
    """Measures real time.

    With collectives on a GPU the host cannot see how long they take: the whole step counts as wire
    time.
    """

    def __init__(self, meter: Meter, *, overlaps: bool = False, on_device: bool = False) -> None:
        self._meter, self._overlaps, self._on_device = meter, overlaps, on_device
        self._last: StepTiming | None = None

    def step_timing(self) -> StepTiming | None:
        meter = self._meter
        codec_s = meter.encode_s + meter.decode_s
        now = StepTiming(perf_counter(), codec_s, meter.wire_s, meter.sent_bytes, meter.waited_s)
        last, self._last = self._last, now
        if last is None:
            return None
        step = StepTiming(*(after - before for after, before in zip(now, last, strict=True)))
        if self._on_device:
            step_s = step.step_s
            return StepTiming(step_s, 0.0, step_s, step.sent_bytes, step_s, self.overhead_s)
        exposed_s = step.exposed_s if self._overlaps else step.codec_s + step.wire_s
        return step._replace(exposed_s=exposed_s, overhead_s=self.overhead_s)


@dataclass
class ModelClock(Clock):
    """Computes the time that a link would take for the bytes sent: simulations are repeatable."""

    meter: Meter
    link: LinkModel
    compute_s: float
    """Duration of a step without a network."""
    _bytes: int = 0
    _calls: int = 0

    def step_timing(self) -> StepTiming | None:
        sent, calls = self.meter.sent_bytes - self._bytes, self.meter.calls - self._calls
        self._bytes, self._calls = self.meter.sent_bytes, self.meter.calls
        wire_s = calls * self.link.latency_s + 8 * sent / self.link.rate_bits
        return StepTiming(self.compute_s + wire_s, 0.0, wire_s, sent, wire_s)
