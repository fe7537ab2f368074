"""Timers, and the cost of one method at one size beside its memory-traffic floor.

A timer takes the median of many calls, on the device's own clock where it has one. The floor of a
step with error feedback is reading gradient and residual and writing the residual, 12 bytes an
element, and writing the message, at the speed of a copy measured in the same run. The floor of
adding up messages is reading them all, and reading and writing the sum once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.base import Compressor, OneRound
from gradwire.bench.microbench.ef_step import TimedCall, ef_step, replay_of, replayed_step
from gradwire.bench.records.schema import KernelRecord
from gradwire.checks import check_whole
from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext, Payload

WARM_UPS = 3
BUDGET_S = 0.25
MIN_REPEATS, MAX_REPEATS = 5, 200


class OverLimit(Exception):
    """No time is left for a measurement that has not begun."""


class TimeLimit:
    """The time for all measurements of a method; the last ones may have fewer calls, or none."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = perf_counter) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._end_s = clock() + limit_s
        self.shortened = False
        """True if a median is over fewer calls than usual."""

    def begin(self) -> None:
        """Raises OverLimit if the time is up."""
        if self._clock() >= self._end_s:
            raise OverLimit

    def fits(self, call_us: float) -> bool:
        """Returns whether a call of that length would end in time; if not, the rest is left out."""
        fits = self._clock() + call_us / 1e6 <= self._end_s
        self.shortened = self.shortened or not fits
        return fits


class Stopwatch(ABC):
    """Times calls one after the other; `median_us` does so until the budget is spent."""

    batch_us: float
    """Short calls are timed in batches of about this time, and each counts its share."""

    @abstractmethod
    def time_us(self, call: Callable[[], object], times: int) -> float:
        """Returns the mean time of `times` calls."""

    def median_us(self, call: Callable[[], object], limit: TimeLimit | None = None) -> float:
        """Returns the median time of a call, after a warm-up.

        Near the end of a limit there are fewer calls, at the end only those of the warm-up.
        """
        if limit is not None:
            limit.begin()
        warm_us: list[float] = []
        for _ in range(WARM_UPS):
            warm_us.append(self.time_us(call, 1))
            if limit is not None and not limit.fits(warm_us[-1]):
                return min(warm_us)
        times = max(1, min(MAX_REPEATS, int(self.batch_us / max(min(warm_us), 1e-3))))
        costs: list[float] = []
        while len(costs) < MIN_REPEATS or (
            len(costs) < MAX_REPEATS and sum(costs) * times < BUDGET_S * 1e6
        ):
            costs.append(self.time_us(call, times))
            if limit is not None and not limit.fits(costs[-1] * times):
                break
        return median(costs)


class HostWatch(Stopwatch):
    """Measures with the host's clock, for CPU tensors."""

    batch_us = 0.0

    def time_us(self, call: Callable[[], object], times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - start) * 1e6 / times


class CudaWatch(Stopwatch):
    """Measures with events on the stream; waits of the host count, since the GPU idles then.

    In a batch the host runs ahead, so that the launch of the first call is not counted.
    """

    batch_us = 1000.0

    def time_us(self, call: Callable[[], object], times: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / times


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaWatch() if device.type == "cuda" else HostWatch()


MESSAGES = 8
"""Number of gathered messages that are decoded and added at once."""

_MAX_THREADS = 1024
"""More than any machine has; torch accepts a number that is far too large, and crashes later."""

_COPIES = 3
"""Tensors of one size that a step needs: the gradient, the residual, and their sum."""

NEEDS_HOST = "the host must wait for the GPU"


class MemoryBaseline(NamedTuple):
    """Speed of the memory at one size, to which all costs are compared."""

    copy_bytes_per_us: float
    add_us: float | None
    """`torch.add(g, r, out=r)`: on a CPU, error feedback without compression."""


class Cost(NamedTuple):
    """The cost of a call: eager, and as a CUDA graph unless the host takes part."""

    graph_us: float | None
    eager_us: float
    graph_error: str | None

    @property
    def us(self) -> float:
        return self.eager_us if self.graph_us is None else self.graph_us


def measure(
    compressor: Compressor,
    x: Tensor,
    watch: Stopwatch,
    baseline: MemoryBaseline,
    blank: KernelRecord,
    limit: TimeLimit,
) -> KernelRecord:
    """Returns the record with the measurements filled in that the limit allows."""
    found = blank
    try:
        for fields in _measurements(compressor, x, watch, baseline, limit):
            found = replace(found, **fields)
    except OverLimit:
        return over_limit(found, limit.limit_s, "not all was measured")
    if limit.shortened:
        return over_limit(found, limit.limit_s, "medians are over few calls")
    return found


def over_limit(record: KernelRecord, limit_s: float, why: str) -> KernelRecord:
    """Marks a record whose measurement ended early; tables show the text before the colon."""
    return replace(record, status="interrupted", error=f"over {limit_s:g} s: {why}")


def _measurements(
    compressor: Compressor,
    x: Tensor,
    watch: Stopwatch,
    baseline: MemoryBaseline,
    limit: TimeLimit,
) -> Iterator[dict[str, Any]]:
    """Yields fields of the record, the step first."""
    ctx = EncodeContext(tuple(x.shape), world_size=MESSAGES)
    payload = compressor.encode(x, ctx)
    floor_us = (12 * x.numel() + payload.nbytes) / baseline.copy_bytes_per_us
    yield {
        "payload_bytes": payload.nbytes,
        "bits_per_element": 8 * payload.nbytes / x.numel(),
        "floor_us": floor_us,
        "add_us": baseline.add_us,
    }
    step = cost(
        ef_step(compressor, x, ctx),
        lambda: replayed_step(compressor, x, ctx),
        _needs_host(compressor),
        watch,
        x.device,
        limit,
    )
    yield {
        "ef_step_us": step.us,
        "ef_step_eager_us": step.eager_us,
        "ef_step_by": "eager" if step.graph_us is None else "graph",
        "graph_error": step.graph_error,
        "ratio_to_floor": step.us / floor_us,
        "ratio_to_add": baseline.add_us and step.us / baseline.add_us,
    }
    yield {"encode_us": watch.median_us(lambda: compressor.encode(x, ctx), limit)}
    yield {"decode_us": watch.median_us(lambda: compressor.decode(payload), limit)}
    if (decode8 := _decode8(compressor, payload, ctx, watch, limit)) is not None:
        read_and_write = 8 * x.numel() + MESSAGES * payload.nbytes
        yield {
            "decode8_us": decode8.us,
            "decode8_eager_us": decode8.eager_us,
            "decode8_floor_us": read_and_write / baseline.copy_bytes_per_us,
        }


def check_setting(sizes: Iterable[int], threads: int, device: torch.device) -> None:
    """Raises ConfigError for too many threads or too little memory, before anything is measured."""
    check_whole("kernels", "threads", threads, 1, _MAX_THREADS)
    for numel in sizes:
        try:
            torch.empty((_COPIES, numel), device=device)
        except RuntimeError:
            raise ConfigError(
                f"kernels: sizes must leave room for {_COPIES} float32 tensors in the memory of "
                f"{device}, got {numel:.3g}"
            ) from None


def measure_baseline(numel: int, device: torch.device, watch: Stopwatch) -> MemoryBaseline:
    """Measures a copy of `numel` float32; on a CPU also an addition in place."""
    # Not zeros: memory that was never written is not mapped yet, and costs nothing to read.
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    copy_us = watch.median_us(lambda: target.copy_(source))
    add_us = None
    if device.type == "cuda":
        # Calls are slow for small tensors, and copies in graphs are slow for large ones; a kernel
        # that reads and writes as much is neither. The fastest is the floor.
        negate = replay_of(lambda: torch.neg(source, out=target))
        copy_us = min(copy_us, watch.median_us(negate))
    else:
        add_us = watch.median_us(lambda: torch.add(source, target, out=target))
    return MemoryBaseline(2 * source.nbytes / copy_us, add_us)


def _decode8(
    compressor: Compressor,
    payload: Payload,
    ctx: EncodeContext,
    watch: Stopwatch,
    limit: TimeLimit,
) -> Cost | None:
    """Measures the addition of eight messages, for methods of one round."""
    if not isinstance(compressor, OneRound):
        return None
    device = payload.parts[0].device
    # Separate copies, as they are gathered: one message read eight times would stay in the cache.
    rows = [torch.stack([part] * MESSAGES) for part in payload.parts]
    messages = [tuple(row[i] for row in rows) for i in range(MESSAGES)]
    out = torch.zeros(ctx.numel, device=device)

    def add() -> None:
        compressor.decode_add(out, messages, 0.125, ctx)

    return cost(add, lambda: replay_of(add), _needs_host(compressor), watch, device, limit)


def _needs_host(compressor: Compressor) -> bool:
    """Returns True if the host takes part in a step, or in decoding."""
    traits = compressor.traits()
    return traits.syncs_host or (
        traits.variable_length and not isinstance(compressor, ThresholdSparsifier)
    )


def cost(
    call: TimedCall,
    replayed: Callable[[], TimedCall],
    syncs_host: bool,
    watch: Stopwatch,
    device: torch.device,
    limit: TimeLimit | None = None,
) -> Cost:
    """Measures eager calls, and the graph that `replayed` makes unless the call syncs the host.

    Then no capture is tried: one that fails leaves torch's random numbers unusable.
    """
    eager_us = watch.median_us(call, limit)
    if device.type != "cuda":
        return Cost(None, eager_us, None)
    if syncs_host:
        return Cost(None, eager_us, NEEDS_HOST)
    if limit is not None:
        # The capture runs the call a few times more.
        limit.begin()
    try:
        replay = replayed()
    except RuntimeError as error:
        return Cost(None, eager_us, str(error).splitlines()[0])
    return Cost(watch.median_us(replay, limit), eager_us, None)
