"""Makes plans: chooses the memory and exchange that were left open, for one method or policies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor, Memory, MultiRound
from gradwire.comm.cost_model import LinkModel
from gradwire.compressors.none import NoCompression
from gradwire.engine.legality import check_exchange, check_memory, loses_sums, wants_residual
from gradwire.engine.plan import Method, Plan, PolicyMethod
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.auto import choose
from gradwire.policies import MethodSpec, Policies, Policy, find_policies, policy_error
from gradwire.spec import (
    POLICY_DEFAULT,
    ExchangeConfig,
    compressor_of,
    exchange_of,
    format_spec,
    memory_of,
)
from gradwire.types import EncodeContext

BUCKET_BYTES = 25 << 20
"""DDP's default bucket size, which is the size of one message before compression."""

DEFAULT_LINK = LinkModel()
"""The link for which an exchange is chosen if none was measured."""

Tensors: TypeAlias = Mapping[str, Tensor] | Iterable[Tensor]
"""The tensors of a plan; policies need their names."""


def make_plan(
    compressor: MethodSpec,
    memory: Memory | str | None,
    exchange: ExchangeConfig | str,
    tensors: Tensors,
    size: int,
) -> Plan:
    """Chooses what was left open, and refuses what cannot work.

    Memory and exchange are those of every policy that does not set its own.
    """
    return plan_for(compressor, memory, lambda _: exchange, tensors, size)


def plan_for(
    compressor: MethodSpec,
    memory: Memory | str | None,
    exchange: Callable[[Compressor], ExchangeConfig | str],
    tensors: Tensors,
    size: int,
) -> Plan:
    """Makes a plan, as `make_plan` does, with an exchange that depends on the compressor."""
    policies = find_policies(compressor)
    if policies is not None:
        return _plan_of_policies(policies, memory, exchange, tensors, size)
    some = list(tensors.values() if isinstance(tensors, Mapping) else tensors)
    assert not isinstance(compressor, Policies | Mapping)
    chosen = compressor_of(compressor)
    method = _method(chosen, memory, exchange(chosen), some, size)
    return Plan(method.compressor, method.memory, method.exchange)


def _method(
    compressor: Compressor,
    memory: Memory | str | None,
    exchange: ExchangeConfig | str,
    tensors: Sequence[Tensor],
    size: int,
) -> Method:
    """Chooses what was left open of one method, and refuses what cannot work."""
    if memory is None:
        memory = "residual" if wants_residual(compressor) else "none"
    memory = memory_of(memory)
    check_memory(compressor, memory)
    config = _resolved(compressor, memory, exchange, tensors, size)
    check_exchange(compressor, memory, config)
    return Method(compressor, memory, config)


def _plan_of_policies(
    policies: Policies,
    memory: Memory | str | None,
    exchange: Callable[[Compressor], ExchangeConfig | str],
    tensors: Tensors,
    size: int,
) -> Plan:
    """Makes the plan of some policies; the default's method comes first in the plan's fields."""
    if not isinstance(tensors, Mapping):
        raise ConfigError(
            f"policies need the names of parameters, which are not known here, got {policies}"
        )
    entries: list[PolicyMethod] = []
    # From the last, which may be the default, so that others can share its exchange.
    for policy, names in reversed(policies.assign(tensors)):
        own = [tensors[name] for name in names]
        asked = policy.exchange or exchange(policy.compressor)
        try:
            kept = policy.memory
            if kept is None and not isinstance(policy.compressor, NoCompression):
                kept = None if memory is None else memory_of(memory)
            if asked == "auto" and entries and _are_sent_dense(policy, own, entries[0].method):
                asked = entries[0].method.exchange
            method = _method(policy.compressor, kept, asked, own, size)
            if policy.pattern != POLICY_DEFAULT:
                _check_compresses(method, own)
        except ConfigError as error:
            raise policy_error(policy.pattern, error) from None
        entries.append(PolicyMethod(policy, method, names))
    _check_nodes(entries)
    used = tuple(entry for entry in reversed(entries) if entry.names)
    default = entries[0].method
    return Plan(default.compressor, default.memory, default.exchange, policies=used)


def _are_sent_dense(policy: Policy, tensors: Sequence[Tensor], default: Method) -> bool:
    """Returns whether the default would send these tensors uncompressed, as the policy does.

    Then they share its exchange, and so its messages, in place of collectives of their own.
    """
    if not isinstance(policy.compressor, NoCompression):
        return False
    return not any(default.compresses(tensor, Plan.min_numel) for tensor in tensors)


def _check_compresses(method: Method, tensors: Sequence[Tensor]) -> None:
    """Raises ConfigError if a method is set for tensors all of which would be sent as they are."""
    if method.is_dense or not tensors:
        return
    if not any(method.compresses(tensor, Plan.min_numel) for tensor in tensors):
        raise ConfigError(
            f"{format_spec(method.compressor)} would compress none of its {len(tensors)} "
            "parameters, which are small, one-dimensional or would not become shorter, and so are "
            "sent as they are; use 'none', or leave them to the default"
        )


def _check_nodes(entries: Sequence[PolicyMethod]) -> None:
    """Raises ConfigError if exchanges have nodes of different sizes, or only some have nodes."""
    nodes = {entry.policy.pattern: entry.method.exchange.node for entry in entries if entry.names}
    if len(set(nodes.values())) > 1:
        shown = ", ".join(f"{pattern!r}: {node or 'none'}" for pattern, node in nodes.items())
        raise ConfigError(
            "policies: all exchanges must be hierarchical with the same node, or none of them, got "
            f"{shown}; set exchange= for all of them"
        )


def _resolved(
    compressor: Compressor,
    memory: Memory,
    exchange: ExchangeConfig | str,
    tensors: Iterable[Tensor],
    size: int,
) -> ExchangeConfig:
    """Returns the exchange with nothing left open, for this number of ranks."""
    if exchange == "auto":
        return choose_exchange(compressor, memory, tensors, size)
    config = exchange_of(exchange)
    if config.node is None:
        config.check_ranks(size)
        return config
    if size % config.node:
        raise ConfigError(
            f"{config.name}: {size} ranks do not make nodes of {config.node}; "
            "node must divide the number of ranks"
        )
    config.check_ranks(size)
    between = config.between or choose_exchange(compressor, memory, tensors, size // config.node)
    return replace(config, between=between)


def choose_exchange(
    compressor: Compressor,
    memory: Memory,
    tensors: Iterable[Tensor],
    size: int,
    link: LinkModel = DEFAULT_LINK,
) -> ExchangeConfig:
    """Chooses the mean if messages can be summed, else gather or sharded by a bucket's message.

    One exchange for all lanes, so that the lanes of a bucket share their rounds.
    """
    if isinstance(compressor, MultiRound):
        return ExchangeConfig(compressor.rounds_like)
    if compressor.traits().is_vote:
        return ExchangeConfig("gather", (("aggregate", "majority"),))
    if compressor.traits().summable and not loses_sums(compressor, memory):
        return ExchangeConfig("mean")
    tensors = list(tensors)
    dense_bytes = sum(t.nbytes for t in tensors)
    nbytes = sum(compressor.nbytes(t.shape) if t.dim() > 1 else t.nbytes for t in tensors)
    buckets = max(1, round(dense_bytes / BUCKET_BYTES))
    sparse = compressor.family in ("sparsification", "hybrid")
    return ExchangeConfig(choose(nbytes // buckets, size, link, sparse=sparse))


def open_lane(
    name: str,
    compressor: Compressor,
    memory: Memory,
    exchange: ExchangeConfig | str,
    ctx: EncodeContext,
    device: torch.device,
) -> Lane:
    """Returns a lane without a plan's choices; `check_memory` and `check_exchange` have passed."""
    aggregator = exchange_of(exchange).wrap(compressor)
    return Lane(name, compressor, aggregator, memory, ctx, device)
