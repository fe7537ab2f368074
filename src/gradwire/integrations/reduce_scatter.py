"""Compressed reduce-scatter: every rank receives only its own shard of the mean."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory, MultiRound, OneRound
from gradwire.comm.meter import reduce_scatter_bytes
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds, own_shard
from gradwire.memory.none import NoMemory
from gradwire.spec import ExchangeConfig, compressor_of, format_spec, name_of
from gradwire.types import EFInput, EncodeContext, Rounds, State


@dataclass(frozen=True)
class ReduceScatterAggregator:
    """The first half of exchange `sharded`: all-to-all of encoded shards, decode and sum.

    The mean that it returns is valid only in this rank's shard.
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


def make_aggregator(exchange: ExchangeConfig, compressor: Compressor) -> Aggregator:
    """Returns the compressor itself if it has its own rounds, which yield the whole mean."""
    if isinstance(compressor, MultiRound):
        return compressor
    assert isinstance(compressor, OneRound)
    return ReduceScatterAggregator(compressor)


def reduce_scatter_plan(
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """Makes the plan of a reduce-scatter, which takes the place of the exchange."""
    if exchange != "auto":
        raise ConfigError(
            f"exchange: a reduce-scatter is one, leave it at 'auto', got {exchange!r}"
        )
    compressor = compressor_of(compressor)
    if compressor.traits().is_vote:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with a reduce-scatter: votes are no mean"
        )
    like = "sharded" if isinstance(compressor, OneRound) else "auto"
    plan = make_plan(compressor, memory, like, tensors, size)
    if not (plan.memory.is_debt or isinstance(plan.memory, NoMemory)):
        raise ConfigError(
            f"memory {name_of(plan.memory)!r} does not go with a reduce-scatter: it needs all of "
            "the mean, of which a rank receives its shard only (use residual, lowbit or none)"
        )
    return replace(plan, wrap=make_aggregator, dense_bytes=reduce_scatter_bytes)
