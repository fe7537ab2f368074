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
from gradwire.spec import find_layers, read_settings
from gradwire.types import EFInput, EncodeContext, Layout, Parts

T = TypeVar("T")

SAMPLES = 8
"""So many of each kind are done and timed."""


class SamplingClock(Clock):
    """A clock on which work that was spared takes the time of work that was done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done: dict[Hashable, list[tuple[int, int]]] = {}
        self._made: dict[Hashable, object] = {}
        self._spared: Counter[Hashable] = Counter()
        self._marks: list[tuple[int, Counter[Hashable]]] = []

    def mark(self) -> int:
        self._marks.append((self._clock.mark(), self._spared.copy()))
        return len(self._marks) - 1

    def seconds(self, start: int, stop: int) -> float:
        (begin, before), (end, after) = self._marks[start], self._marks[stop]
        spared_s = sum(count * self._each_s(kind) for kind, count in (after - before).items())
        return self._clock.seconds(begin, end) + spared_s

    def once(self, kind: Hashable, work: Callable[[], T]) -> T:
        """What the work makes, or where enough of its kind is done, what the last one made."""
        done = self._done.setdefault(kind, [])
        if len(done) >= SAMPLES:
            self._spared[kind] += 1
            return cast(T, self._made[kind])
        start = self._clock.mark()
        made = work()
        done.append((start, self._clock.mark()))
        self._made[kind] = made
        return made

    def _each_s(self, kind: Hashable) -> float:
        return median(self._clock.seconds(*span) for span in self._done[kind])


class _Sampled(FusedOneRound):
    """A method that encodes and decodes only some of the shards of each length."""

    def __init__(self, codec: OneRound, clock: SamplingClock) -> None:
        self._codec, self._clock = codec, clock

    def traits(self) -> Traits:
        return self._codec.traits()

    def layout(self, numel: int) -> Layout:
        kind = "layout", id(self._codec), numel
        return self._clock.once(kind, lambda: self._codec.layout(numel))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        kind = "compress", id(self._codec), x.numel()
        return self._clock.once(kind, lambda: self._codec.compress(x, ctx))

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        kind = "take", id(self._codec), ef.grad.numel()
        return self._clock.once(kind, lambda: encode_with_feedback(self._codec, ef, ctx))

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        kind = "add_to", id(self._codec), out.numel(), len(messages)
        self._clock.once(kind, lambda: self._codec.decode_add(out, messages, weight, ctx))


def sampled(plan: Plan, clock: SamplingClock) -> Plan:
    """The same plan, whose shards are sampled where it has any.

    Messages whose length depends on what they say are all made, so that no byte is made up.
    """
    layers = find_layers(plan.exchange)
    between = plan.exchange if layers is None else layers.between
    if read_settings(between)[0] != "sharded":
        return plan

    def wrap(exchange: str, compressor: Compressor) -> Aggregator:
        if isinstance(compressor, OneRound) and not compressor.traits().variable_length:
            compressor = _Sampled(compressor, clock)
        return plan.wrap(exchange, compressor)

    return replace(plan, wrap=wrap)
