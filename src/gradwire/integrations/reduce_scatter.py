"""Compressed reduce-scatter: every rank receives only its own shard of the mean."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory, MultiRound, OneRound
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds, own_shard
from gradwire.memory.none import NoMemory
from gradwire.spec import compressor_of, format_spec, name_of
from gradwire.types import EFInput, EncodeContext, Rounds, State


@dataclass(frozen=True)
class Scattered:
    """The first half of exchange `sharded`: all-to-all of encoded shards, decode and sum.

    The mean that it returns is right in this rank's shard, and nowhere else.
    """

    codec: OneRound

    loss_scaled_keys: ClassVar[tuple[str, ...]] = ()
    sharded_keys: ClassVar[tuple[str, ...]] = ()
    unsent_keys: ClassVar[tuple[str, ...]] = ()
    ranks_per_replica: ClassVar[int] = 1
    graph_safe: ClassVar[bool] = True

    @property
    def propagates_nonfinite(self) -> bool:
        return self.codec.traits().propagates_nonfinite

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        mine = yield from own_shard(self.codec, ef, ctx)
        start, stop = bounds(ctx.numel, ctx.world_size)[ctx.rank]
        ef.grad[start:stop] = mine
        return ef.grad


def aggregator(exchange: str, compressor: Compressor) -> Aggregator:
    """Who talks: a method in rounds of its own tells every rank all, so that is in it too."""
    if isinstance(compressor, MultiRound):
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
    if compressor.traits().is_vote:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with a reduce-scatter: votes are no mean"
        )
    way = "sharded" if isinstance(compressor, OneRound) else "auto"
    plan = make_plan(compressor, memory, way, tensors, size)
    if not (plan.memory.is_debt or isinstance(plan.memory, NoMemory)):
        raise ConfigError(
            f"memory {name_of(plan.memory)!r} does not go with a reduce-scatter: it needs all of "
            "the mean, of which a rank hears its shard (use residual, lowbit or none)"
        )
    return replace(plan, wrap=aggregator)
