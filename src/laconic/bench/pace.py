"""What time it would be on a network: from forecasts, or from what was counted."""

from dataclasses import dataclass

from laconic.bench.simulate_bench import Links
from laconic.bench.trainee import Seen
from laconic.forecast.forecast import Prediction
from laconic.network.model import way


@dataclass(frozen=True)
class Pace:
    """A step's time, and that of what is said beside it; the parts are means per step."""

    step_s: float
    byte_s: float = 0.0
    call_s: float = 0.0
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None

    def time_s(self, seen: Seen) -> float:
        return seen.step * self.step_s + seen.sent_bytes * self.byte_s + seen.calls * self.call_s


def forecast_pace(predicted: Prediction) -> Pace:
    """Of a method that does the same in every step."""
    step_s, _, encode_s, wire_s, decode_s = predicted.forecast
    return Pace(step_s, encode_ms=encode_s * 1e3, wire_ms=wire_s * 1e3, decode_ms=decode_s * 1e3)


def counted_pace(compute_s: float, links: Links, workers: int) -> Pace:
    """Of a method that says now more, now less: all computation, then all bytes of a link.

    What encoding and decoding take is left out, and every call waits like a ring's mean.
    """
    hops = way("mean", 0, workers).hops
    return Pace(compute_s, 8 / links.rate_bits, hops * links.latency_s)
