"""How long a step took: by the wall, or by a model where there is no network."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter

from laconic.comm.meter import Meter
from laconic.network.model import LinkModel


class Clock(ABC):
    """Laps from step to step."""

    @abstractmethod
    def lap_s(self) -> float | None:
        """Seconds since it was asked before; None the first time, where nobody knows."""


class WallClock(Clock):
    """Time as it passes: a whole iteration of the training loop."""

    def __init__(self) -> None:
        self._last: float | None = None

    def lap_s(self) -> float | None:
        now = perf_counter()
        last, self._last = self._last, now
        return None if last is None else now - last


@dataclass
class ModelClock(Clock):
    """The time that a link would take for what was sent, so that a simulation can be repeated."""

    meter: Meter
    link: LinkModel
    compute_s: float
    """What a step takes without a network."""
    _bytes: int = 0
    _calls: int = 0

    def lap_s(self) -> float | None:
        sent, calls = self.meter.sent_bytes - self._bytes, self.meter.calls - self._calls
        self._bytes, self._calls = self.meter.sent_bytes, self.meter.calls
        return self.compute_s + calls * self.link.latency_s + 8 * sent / self.link.rate_bits
