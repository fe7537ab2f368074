"""Shard sampling: times a few of many equal shards and scales the time to all of them.

Among 1,024 ranks a sharded exchange encodes 1,024 shards of every tensor. Shards of one length take
the same time and make messages of the same length, so a few of each stand for all.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar, cast

from torch import Tensor

from gradwire.base import (
    Aggregator,
    Compressor,
    FusedOneRound,
    OneRound,
    Traits,
    encode_with_feedback,
)
from gradwire.engine.plan import Plan
from gradwire.perfmodel.timers import Clock
from gradwire.spec import ExchangeConfig
from gradwire.types import EFInput, EncodeContext, Layout, Parts

T = TypeVar("T")

SAMPLES = 8
"""Shards of each kind that are encoded and timed."""


class SamplingClock(Clock):
    """A clock that counts skipped work with the median time of equal work that was done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: dict[Hashable, list[tuple[int, int]]] = {}
        self._results: dict[Hashable, object] = {}
        self._skipped: Counter[Hashable] = Counter()
        self._marks: list[tuple[int, Counter[Hashable]]] = []

    def mark(self) -> int:
        self._marks.append((self._clock.mark(), self._skipped.copy()))
        return len(self._marks) - 1

    def seconds(self, start: int, stop: int) -> float:
        (begin, before), (end, after) = self._marks[start], self._marks[stop]
        skipped_s = sum(count * self._median_s(kind) for kind, count in (after - before).items())
        return self._clock.seconds(begin, end) + skipped_s

    def run_or_reuse(self, kind: Hashable, work: Callable[[], T]) -> T:
        """Runs the work, or returns the last result if enough work of its kind has been done."""
        spans = self._spans.setdefault(kind, [])
        if len(spans) >= SAMPLES:
            self._skipped[kind] += 1
            return cast(T, self._results[kind])
        start = self._clock.mark()
        result = work()
        spans.append((start, self._clock.mark()))
        self._results[kind] = result
        return result

    def _median_s(self, kind: Hashable) -> float:
        return median(self._clock.seconds(*span) for span in self._spans[kind])


class _SampledCodec(FusedOneRound):
    """Encodes and decodes only some of the shards of each length."""

    def __init__(self, codec: OneRound, clock: SamplingClock) -> None:
        self._codec, self._clock = codec, clock

    def traits(self) -> Traits:
        return self._codec.traits()

    def layout(self, numel: int) -> Layout:
        kind = "layout", id(self._codec), numel
        return self._clock.run_or_reuse(kind, lambda: self._codec.layout(numel))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        kind = "compress", id(self._codec), x.numel()
        return self._clock.run_or_reuse(kind, lambda: self._codec.compress(x, ctx))

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        kind = "take", id(self._codec), ef.grad.numel()
        return self._clock.run_or_reuse(kind, lambda: encode_with_feedback(self._codec, ef, ctx))

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        kind = "add_to", id(self._codec), out.numel(), len(messages)
        self._clock.run_or_reuse(kind, lambda: self._codec.decode_add(out, messages, weight, ctx))


def sample_shards(plan: Plan, clock: SamplingClock) -> Plan:
    """Returns the plan with sampled shards, or as it is if its exchange has none.

    Messages whose length depends on their values are all encoded, so that byte counts stay exact.
    """
    if all(method.exchange.across_nodes.name != "sharded" for method in plan.methods):
        return plan

    def wrap(exchange: ExchangeConfig, compressor: Compressor) -> Aggregator:
        if isinstance(compressor, OneRound) and not compressor.traits().variable_length:
            compressor = _SampledCodec(compressor, clock)
        return plan.wrap(exchange, compressor)

    return replace(plan, wrap=wrap)
