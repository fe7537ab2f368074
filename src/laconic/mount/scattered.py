"""Reduce-scatter: every rank hears only of its own shard of the mean."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic.contract import Compressor, ManyRounds, Memory, OneRound, Talker, take
from laconic.errors import ConfigError
from laconic.exchange.sharded import bounds, shard_turn
from laconic.memory.none import NoMemory
from laconic.plan import Plan, make_plan
from laconic.spec import format_spec, name_of, parse
from laconic.types import Given, Rounds, Scatter, State, Turn


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

    def state(self, turn: Turn, device: torch.device) -> State:
        return {}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        shards = bounds(turn.numel, turn.size)
        turns = [shard_turn(turn, i, stop - start) for i, (start, stop) in enumerate(shards)]
        layouts = [self.codec.layout(shard.numel) for shard in turns]
        messages = [
            take(self.codec, given.slice(start, stop), shard)
            for (start, stop), shard in zip(shards, turns, strict=True)
        ]
        heard = yield Scatter(messages, layouts, turn.rank)
        start, stop = shards[turn.rank]
        mine = given.x[start:stop].zero_()
        self.codec.add_to(mine, heard, 1 / turn.size, turns[turn.rank])
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
    compressor = parse(compressor) if isinstance(compressor, str) else compressor
    if isinstance(compressor, Compressor) and compressor.traits().votes:
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
