"""Timers, and the cost of one method at one size beside its memory-traffic floor.

A timer takes the median of many calls, on the device's own clock where it has one. The floor of a
step with error feedback is reading gradient and residual and writing the residual, 12 bytes an
element, and writing the message, at the speed of a copy measured in the same run. The floor of
adding up messages is reading them all, and reading and writing the sum once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.base import Compressor, OneRound
from gradwire.bench.microbench.ef_step import Collective, ef_step, replay_of, replayed_step
from gradwire.bench.records.schema import KernelRecord
from gradwire.checks import check_whole
from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext, Payload

WARM_UPS = 3
BUDGET_S = 0.25
FEWEST, MOST = 5, 200


class Stopwatch(ABC):
    """Times calls one after the other; `median_us` does so until the budget is spent."""

    row_us: float
    """Short calls are timed in rows that take about so long, and cost their share of it."""

    @abstractmethod
    def once_us(self, call: Callable[[], object], times: int) -> float:
        """What each of so many calls takes."""

    def median_us(self, call: Callable[[], object]) -> float:
        one_us = min(self.once_us(call, 1) for _ in range(WARM_UPS))
        times = max(1, min(MOST, int(self.row_us / max(one_us, 1e-3))))
        costs: list[float] = []
        while len(costs) < FEWEST or (len(costs) < MOST and sum(costs) * times < BUDGET_S * 1e6):
            costs.append(self.once_us(call, times))
        return median(costs)


class HostWatch(Stopwatch):
    """The host's clock, for CPU tensors."""

    row_us = 0.0

    def once_us(self, call: Callable[[], object], times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - start) * 1e6 / times


class CudaWatch(Stopwatch):
    """Events on the stream: what the host waits for in a call counts, since the GPU idles then.

    In a row the host runs ahead, so that starting the first call is not taken for its work.
    """

    row_us = 1000.0

    def once_us(self, call: Callable[[], object], times: int) -> float:
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
"""How many gathered messages are decoded and added at once."""

_MOST_THREADS = 1024
"""More than any machine has; torch takes a number that is far too large, and dies of it later."""

_COPIES = 3
"""Tensors of one size that a step needs: the gradient, the residual, and their sum."""

WAITS = "its host must wait for the card"


class Ground(NamedTuple):
    """What memory does at one size: the measure of all that follows there."""

    copy_bytes_per_us: float
    add_us: float | None
    """`torch.add(g, r, out=r)`: on a CPU, error feedback without compression."""


class Cost(NamedTuple):
    """As a graph where the card can do without the host, and by calls."""

    graph_us: float | None
    eager_us: float
    graph_error: str | None

    @property
    def us(self) -> float:
        return self.eager_us if self.graph_us is None else self.graph_us


def measure(
    compressor: Compressor, x: Tensor, watch: Stopwatch, ground: Ground, blank: KernelRecord
) -> KernelRecord:
    """The record with all that is measured filled in."""
    ctx = EncodeContext(tuple(x.shape), world_size=MESSAGES)
    payload = compressor.encode(x, ctx)
    decode8 = _decode8(compressor, payload, ctx, watch)
    step = cost(
        ef_step(compressor, x, ctx),
        lambda: replayed_step(compressor, x, ctx),
        _waits(compressor),
        watch,
        x.device,
    )
    floor_us = (12 * x.numel() + payload.nbytes) / ground.copy_bytes_per_us
    read_and_write = 8 * x.numel() + MESSAGES * payload.nbytes
    return replace(
        blank,
        encode_us=watch.median_us(lambda: compressor.encode(x, ctx)),
        decode_us=watch.median_us(lambda: compressor.decode(payload)),
        decode8_us=decode8 and decode8.us,
        decode8_eager_us=decode8 and decode8.eager_us,
        decode8_floor_us=decode8 and read_and_write / ground.copy_bytes_per_us,
        ef_step_us=step.us,
        ef_step_eager_us=step.eager_us,
        ef_step_by="eager" if step.graph_us is None else "graph",
        graph_error=step.graph_error,
        payload_bytes=payload.nbytes,
        bits_per_element=8 * payload.nbytes / x.numel(),
        floor_us=floor_us,
        ratio_to_floor=step.us / floor_us,
        add_us=ground.add_us,
        ratio_to_add=ground.add_us and step.us / ground.add_us,
    )


def check_setting(sizes: Iterable[int], threads: int, device: torch.device) -> None:
    """Raises ConfigError for what would end a run midway: no such threads, or too little memory."""
    check_whole("kernels", "threads", threads, 1, _MOST_THREADS)
    for numel in sizes:
        try:
            torch.empty((_COPIES, numel), device=device)
        except RuntimeError:
            raise ConfigError(
                f"kernels: sizes must leave room for {_COPIES} float32 tensors in the memory of "
                f"{device}, got {numel:.3g}"
            ) from None


def ground_at(numel: int, device: torch.device, watch: Stopwatch) -> Ground:
    """A copy of so many float32, read and written; on a CPU also the sum of two into one."""
    # Not zeros: memory that was never written is not there yet, and costs nothing to read.
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    copy_us = watch.median_us(lambda: target.copy_(source))
    add_us = None
    if device.type == "cuda":
        # Calls are slow where the tensor is small, and graphs copy slowly where it is large: a
        # kernel that reads and writes as much is neither, and the fastest is the floor.
        negate = replay_of(lambda: torch.neg(source, out=target))
        copy_us = min(copy_us, watch.median_us(negate))
    else:
        add_us = watch.median_us(lambda: torch.add(source, target, out=target))
    return Ground(2 * source.nbytes / copy_us, add_us)


def _decode8(
    compressor: Compressor, payload: Payload, ctx: EncodeContext, watch: Stopwatch
) -> Cost | None:
    """Eight messages added up, for methods whose messages are."""
    if not isinstance(compressor, OneRound):
        return None
    device = payload.parts[0].device
    # In memory of their own, as they are gathered: one that is read eight times stays in the cache.
    rows = [torch.stack([part] * MESSAGES) for part in payload.parts]
    said = [tuple(row[i] for row in rows) for i in range(MESSAGES)]
    out = torch.zeros(ctx.numel, device=device)

    def add() -> None:
        compressor.decode_add(out, said, 0.125, ctx)

    return cost(add, lambda: replay_of(add), _waits(compressor), watch, device)


def _waits(compressor: Compressor) -> bool:
    """Whether the host takes part in a step, or in decoding."""
    traits = compressor.traits()
    return traits.syncs_host or (
        traits.variable_length and not isinstance(compressor, ThresholdSparsifier)
    )


def cost(
    call: Collective,
    replayed: Callable[[], Collective],
    syncs_host: bool,
    watch: Stopwatch,
    device: torch.device,
) -> Cost:
    """By calls, and as the graph that `replayed` makes unless the host `syncs_host` for the card.

    Where it does nothing is tried: a capture that fails leaves torch's random numbers unusable.
    """
    eager_us = watch.median_us(call)
    if device.type != "cuda":
        return Cost(None, eager_us, None)
    if syncs_host:
        return Cost(None, eager_us, WAITS)
    try:
        replay = replayed()
    except RuntimeError as error:
        return Cost(None, eager_us, str(error).splitlines()[0])
    return Cost(watch.median_us(replay), eager_us, None)
