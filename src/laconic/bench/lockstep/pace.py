"""What time it would be on a network: from forecasts, or from what was counted."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from laconic.bench.cases.local_methods import Rhythm
from laconic.bench.forecast.simulate import Links
from laconic.bench.lockstep.laps import Watch
from laconic.bench.lockstep.trainee import Seen
from laconic.network.model import way


class Split(NamedTuple):
    """What a step's exchange takes, on average; None where nobody has forecast it."""

    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None


class Pace(ABC):
    """The clock of one run on one network."""

    @abstractmethod
    def time_s(self, seen: Seen) -> float:
        """How late it is after what was seen."""

    @abstractmethod
    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        """What steps have taken at the end."""

    @abstractmethod
    def split(self) -> Split: ...


@dataclass(frozen=True)
class ForecastPace(Pace):
    """Of a method whose every step can be forecast."""

    watch: Watch

    def time_s(self, seen: Seen) -> float:
        return self.watch.passed_s(seen.step)

    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        return tuple(self.watch.steps_ms(last.step))

    def split(self) -> Split:
        usual = self.watch.usual()
        return Split(usual.encode_s * 1e3, usual.wire_s * 1e3, usual.decode_s * 1e3)


@dataclass(frozen=True)
class CountedPace(Pace):
    """Of a method that says now more, now less: all computation, then all bytes of a link.

    What encoding and decoding take is left out, and every call waits like a ring's mean. What is
    heard later than told travels meanwhile, one telling after the other, and only what is left of
    its way then is waited for.
    """

    links: Links
    compute_s: float
    workers: int
    rhythm: Rhythm

    def time_s(self, seen: Seen) -> float:
        waits_s = seen.calls * way("mean", 0, self.workers).hops * self.links.latency_s
        wire_s = 8 * seen.sent_bytes / self.links.rate_bits + waits_s
        gap, delay = self.rhythm
        meanwhile_s = seen.step // gap * min(gap, delay) * self.compute_s
        return seen.step * self.compute_s + max(0.0, wire_s - meanwhile_s)

    def steps_ms(self, last: Seen) -> tuple[float, ...]:
        return (self.time_s(last) / last.step * 1e3,)

    def split(self) -> Split:
        return Split()
