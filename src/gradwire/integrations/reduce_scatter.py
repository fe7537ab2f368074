"""Compressed reduce-scatter: every rank receives only its own shard of the mean."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.base import Aggregator, Compressor, Memory, MultiRound, OneRound
from gradwire.comm.meter import reduce_scatter_bytes
from gradwire.engine.make_plan import Tensors, plan_for
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds, own_shard
from gradwire.memory.none import NoMemory
from gradwire.policies import MethodSpec, find_policies
from gradwire.spec import ExchangeConfig, format_spec, name_of
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
    compressor: MethodSpec,
    memory: Memory | str | None,
    exchange: str,
    tensors: Tensors,
    size: int,
) -> Plan:
    """Makes the plan of a reduce-scatter, which takes the place of the exchange."""
    if exchange != "auto":
        raise ConfigError(
            f"exchange: a reduce-scatter is one, leave it at 'auto', got {exchange!r}"
        )
    policies = find_policies(compressor)
    for policy in () if policies is None else policies.policies:
        if policy.exchange is not None:
            raise ConfigError(
                f"policy {policy.pattern!r}: a reduce-scatter is the exchange, leave "
                f"{str(policy.exchange)!r} out"
            )
    plan = plan_for(compressor, memory, _exchange_like, tensors, size)
    for method in plan.methods:
        if not (method.memory.is_debt or isinstance(method.memory, NoMemory)):
            raise ConfigError(
                f"memory {name_of(method.memory)!r} does not go with a reduce-scatter: it needs "
                "all of the mean, of which a rank receives its shard only (use residual, lowbit or "
                "none)"
            )
    return replace(plan, wrap=make_aggregator, dense_bytes=reduce_scatter_bytes)


def _exchange_like(compressor: Compressor) -> str:
    """Returns the exchange of which a reduce-scatter is a part; refuses votes."""
    if compressor.traits().is_vote:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with a reduce-scatter: votes are no mean"
        )
    return "sharded" if isinstance(compressor, OneRound) else "auto"
