"""Numbers of the last step for experiment loggers: bytes, times, and now and then the errors."""

from collections.abc import Iterable
from dataclasses import replace
from math import hypot
from time import perf_counter

from gradwire.comm.meter import Meter
from gradwire.engine.engine import Engine
from gradwire.engine.step import SAMPLE_EVERY
from gradwire.errors import ConfigError


class LastStep:
    """Keeps what a meter has counted between the ends of the last two steps.

    `exposes` is how the exchange delays training: "waits" are what the meter's `waited_s` counts,
    "all" of its time, or "unknown", as it is on NCCL, where the host enqueues and does not wait.
    """

    def __init__(self, meter: Meter, exposes: str) -> None:
        self._meter, self._exposes = meter, exposes
        self._at_end, self._dense_at_end = replace(meter), 0
        self._ended_s: float | None = None
        self._step: Meter | None = None
        self._dense_bytes, self._step_s = 0, 0.0
        self._is_timed = False
        self._sample = -1

    def end(self, dense_bytes: int) -> None:
        """Ends a step; `dense_bytes` are those that dense steps would have sent so far."""
        self._step = self._meter.since(self._at_end)
        self._dense_bytes = dense_bytes - self._dense_at_end
        self._at_end, self._dense_at_end = replace(self._meter), dense_bytes
        now_s = perf_counter()
        self._step_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        self._ended_s, self._is_timed = now_s, self._exposes != "unknown"

    def end_uncounted(self, step: Meter, dense_bytes: int) -> None:
        """Notes the last of some steps that a framework exchanged, and that were just counted."""
        self._step, self._dense_bytes, self._is_timed = step, step.sent_bytes, False
        self._at_end, self._dense_at_end = replace(self._meter), dense_bytes
        self._ended_s, self._step_s = None, 0.0

    def numbers(
        self, prefix: object, step: int, engines: Iterable[Engine], exchanges: int | None
    ) -> dict[str, float]:
        """Returns the numbers by name; `exchanges` counts those so far, None while one runs.

        The errors cost a pass over the residuals, and on a GPU a wait. So they are only there in
        the first call after the engine has sampled the relative error, once in `SAMPLE_EVERY`.
        """
        if not isinstance(prefix, str):
            raise ConfigError(f"metrics: prefix must be a string, got {prefix!r}")
        if self._step is None:
            return {}
        engines = list(engines)
        found = {"step": step, **self._traffic(self._step), **self._times(self._step)}
        found["bits_per_element"] = _bits_per_element(engines)
        if exchanges is not None and (exchanges - 1) // SAMPLE_EVERY != self._sample:
            self._sample = (exchanges - 1) // SAMPLE_EVERY
            found |= mean_errors(engines)
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def _traffic(self, step: Meter) -> dict[str, float]:
        sent = step.sent_bytes
        return {
            "sent_bytes": sent,
            "received_bytes": step.received_bytes,
            "dense_bytes": self._dense_bytes,
            "ratio": self._dense_bytes / sent if sent else 1.0,
            "calls": step.calls,
        }

    def _times(self, step: Meter) -> dict[str, float]:
        found = {"step_s": self._step_s} if self._step_s else {}
        if not self._is_timed:
            return found
        exchange_s = step.encode_s + step.wire_s + step.decode_s
        exposed_s = exchange_s if self._exposes == "all" else step.waited_s
        return {
            **found,
            "encode_s": step.encode_s,
            "wire_s": step.wire_s,
            "decode_s": step.decode_s,
            "exposed_s": exposed_s,
            "hidden_s": max(0.0, exchange_s - exposed_s),
        }


def mean_errors(engines: Iterable[Engine]) -> dict[str, float]:
    """Returns the mean relative error of some engines, and the norm of all their residuals."""
    each = [engine.errors() for engine in engines]
    return {
        "relative_error": sum(errors["relative_error"] for errors in each) / max(1, len(each)),
        "residual_norm": hypot(*(errors["residual_norm"] for errors in each)),
    }


def _bits_per_element(engines: Iterable[Engine]) -> float:
    """Returns the length of a message about all parameters in the current settings."""
    lanes = [lane for engine in engines for lane in engine.lanes.values()]
    elements = sum(lane.ctx.numel for lane in lanes)
    return 8 * sum(lane.message_bytes for lane in lanes) / max(1, elements)
