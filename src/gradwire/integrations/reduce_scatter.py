"""Compressed reduce-scatter: every rank receives only its own shard of the mean."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Compressor, ManyRounds, Memory, OneRound, Talker
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds, own_shard
from gradwire.memory.none import NoMemory
from gradwire.spec import compressor_of, format_spec, name_of
from gradwire.types import Given, Rounds, State, Turn


@dataclass(frozen=True)
class Scattered:
    """The first half of exchange `sharded`: all-to-all of encoded shards, decode and sum.

    The mean that it returns is right in this rank's shard, and nowhere else.
    """

    codec: OneRound

    units: ClassVar[tuple[str, ...]] = ()
    shards: ClassVar[tuple[str, ...]] = ()
    owed: ClassVar[tuple[str, ...]] = ()
    unison: ClassVar[int] = 1
    steady: ClassVar[bool] = True

    @property
    def shows(self) -> bool:
        return self.codec.traits().shows

    def state(self, turn: Turn, device: torch.device) -> State:
        return {}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        mine = yield from own_shard(self.codec, given, turn)
        start, stop = bounds(turn.numel, turn.size)[turn.rank]
        given.x[start:stop] = mine
        return given.x


def talker(exchange: str, compressor: Compressor) -> Talker:
    """Who talks: a method in rounds of its own tells every rank all, so that is in it too."""
    if isinstance(compressor, ManyRounds):
        return compressor
    assert isinstance(compressor, OneRound)
    return Scattered(compressor)


def scatter_plan(
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """The plan of a reduce-scatter; it is its own exchange."""
    if exchange != "auto":
        raise ConfigError(
            f"exchange: a reduce-scatter is one, leave it at 'auto', got {exchange!r}"
        )
    compressor = compressor_of(compressor)
    if compressor.traits().votes:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with a reduce-scatter: votes are no mean"
        )
    way = "sharded" if isinstance(compressor, OneRound) else "auto"
    plan = make_plan(compressor, memory, way, tensors, size)
    if not (plan.memory.owes or isinstance(plan.memory, NoMemory)):
        raise ConfigError(
            f"memory {name_of(plan.memory)!r} does not go with a reduce-scatter: it needs all of "
            "the mean, of which a rank hears its shard (use residual, lowbit or none)"
        )
    return replace(plan, wrap=talker)
