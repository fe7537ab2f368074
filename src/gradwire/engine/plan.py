"""The plan: the compressor, memory and exchange of each parameter, and what combines legally."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from gradwire.base import (
    Aggregator,
    Compressor,
    Memory,
    MultiRound,
    OneRound,
    TwoLevelExchange,
    UpdateRule,
)
from gradwire.comm.cost_model import LinkModel
from gradwire.comm.meter import ring_bytes
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.engine.chunks import Chunk, check_chunk_bytes, cut
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.auto import choose
from gradwire.identity import code_digests, identity_of
from gradwire.memory._update import LocalUpdate, MeanUpdate
from gradwire.memory.none import NoMemory
from gradwire.policies import MethodSpec, Policies, Policy, find_policies, policy_error
from gradwire.spec import (
    POLICY_DEFAULT,
    ExchangeConfig,
    compressor_of,
    exchange_classes,
    exchange_of,
    find_exchange,
    format_spec,
    memory_classes,
    memory_of,
    name_of,
)
from gradwire.types import EncodeContext

DENSE: dict[torch.dtype, OneRound] = {
    torch.float32: NoCompression(),
    torch.bfloat16: Bf16(),
    torch.float16: Fp16(),
}
"""Compressors that send a tensor as it is, in its own dtype."""

BUCKET_BYTES = 25 << 20
"""DDP's default bucket size, which is the size of one message before compression."""

DEFAULT_LINK = LinkModel()
"""The link for which an exchange is chosen if none was measured."""

Wrap: TypeAlias = Callable[[ExchangeConfig, Compressor], Aggregator]
"""Builds the aggregator of a lane from an exchange and a compressor."""


Tensors: TypeAlias = Mapping[str, Tensor] | Iterable[Tensor]
"""The tensors of a plan; policies need their names."""


@dataclass(frozen=True)
class Method:
    """A compressor with the memory and the exchange that it goes with."""

    compressor: Compressor
    memory: Memory
    exchange: ExchangeConfig

    @cached_property
    def is_dense(self) -> bool:
        """True if gradients are sent as they are, so that nothing is left to keep."""
        return isinstance(self.compressor, NoCompression)

    @cached_property
    def counts_votes(self) -> bool:
        """True if the gradient becomes a majority of signs instead of a mean."""
        return self.compressor.traits().is_vote or self.exchange.aggregate == "majority"

    def choice(self, tensor: Tensor, min_numel: int) -> tuple[Compressor, Memory]:
        """Returns what a tensor is sent by: the method, or uncompressed where that is as short."""
        dense = DENSE[tensor.dtype]
        if self.is_dense:
            # Everything is sent, so there is no residual.
            return dense, NoMemory()
        if self.compressor.traits().suits_small_tensors:
            return self.compressor, self.memory
        small = tensor.dim() < 2 or tensor.numel() < min_numel
        if small or self.compressor.nbytes(tensor.shape) >= tensor.nbytes:
            return dense, NoMemory()
        return self.compressor, self.memory

    def compresses(self, tensor: Tensor, min_numel: int) -> bool:
        """Returns whether a tensor is sent by the method, and not uncompressed."""
        # `Plan.lane` refuses other dtypes.
        if tensor.dtype not in DENSE:
            return False
        return self.choice(tensor, min_numel)[0] is self.compressor

    def identity(self) -> dict[str, object]:
        """Returns classes and all parameters, defaults included, which ranks and states compare."""
        return {
            "compressor": identity_of(self.compressor),
            "memory": identity_of(self.memory),
            "exchange": self.exchange.identity(),
        }

    def code_digests(self) -> dict[str, str]:
        """Returns digests of the code of classes outside the package."""
        return {
            **code_digests(self.compressor),
            **code_digests(self.memory),
            **code_digests(find_exchange(self.exchange.name)),
            **code_digests(find_exchange(self.exchange.across_nodes.name)),
        }


class PolicyMethod(NamedTuple):
    """A policy with the method of its parameters, in which nothing is left open."""

    policy: Policy
    method: Method
    names: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """A legal choice for all parameters; small and one-dimensional tensors are sent dense.

    With policies, `compressor`, `memory` and `exchange` are those of the default.
    """

    compressor: Compressor
    memory: Memory
    exchange: ExchangeConfig
    min_numel: int = 1024
    wrap: Wrap = ExchangeConfig.wrap
    """An integration that needs only a part of the mean replaces it by its own."""
    dense_bytes: Callable[[int, int], int] = ring_bytes
    """Bytes that a rank would send for gradients of so many bytes among so many ranks without
    compression; `stats()["ratio"]` is relative to it."""
    rules: tuple[tuple[str, UpdateRule], ...] = ()
    """The update rule of every parameter by name, if an optimiser of ours trains the model."""
    updates_mean: bool = False
    """True if rules take the mean gradient, as a dense optimiser does; else updates are sent."""
    chunk_bytes: int = 0
    """Larger parameters are cut into chunks of at most this size, unless it is 0."""
    policies: tuple[PolicyMethod, ...] = ()
    """The methods by pattern, the default included if any parameter has it; empty without."""

    @cached_property
    def default(self) -> Method:
        """The method of all parameters that no pattern matches."""
        for policy, method, _ in self.policies:
            if policy.pattern == POLICY_DEFAULT:
                return method
        return Method(self.compressor, self.memory, self.exchange)

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """The methods that parameters have."""
        return tuple(entry.method for entry in self.policies) or (self.default,)

    @cached_property
    def _method_by_name(self) -> dict[str, Method]:
        return {name: entry.method for entry in self.policies for name in entry.names}

    def method_of(self, lane: str) -> Method:
        """Returns the method of a lane: that of its parameter, whose chunk it may be."""
        if not self.policies:
            return self.default
        return self._method_by_name[_parameter_of(lane, self._method_by_name)]

    def with_method(self, method: Method) -> "Plan":
        """Returns the plan with this method for all parameters."""
        compressor, memory, exchange = method.compressor, method.memory, method.exchange
        return replace(self, compressor=compressor, memory=memory, exchange=exchange, policies=())

    def in_chunks(self, tensors: Mapping[str, Tensor], chunk_bytes: int) -> "Plan":
        """Returns the plan with chunks of this size; raises ConfigError if a parameter forbids it.

        A size of 0 means that no parameter is cut.
        """
        if chunk_bytes:
            for method in self.methods:
                own = {n: t for n, t in tensors.items() if self.method_of(n) is method}
                compressed = {n: t for n, t in own.items() if self._may_cut(n, t)}
                check_chunk_bytes(method.compressor, compressed, chunk_bytes)
        return replace(self, chunk_bytes=chunk_bytes)

    def chunks(self, name: str, tensor: Tensor) -> list[Chunk]:
        """Returns the chunks of one parameter; none if it is not cut, or is sent dense."""
        if not self.chunk_bytes or not self._may_cut(name, tensor):
            return []
        block = self.method_of(name).compressor.traits().block
        return cut(name, tensor, block, self.chunk_bytes)

    def lane(
        self, name: str, tensor: Tensor, rank: int, size: int, seed: int, reversible: bool = True
    ) -> Lane:
        """Returns the lane of one parameter."""
        if tensor.dtype not in DENSE:
            raise ConfigError(f"parameter {name!r} is {tensor.dtype}; expected {[*DENSE]}")
        ctx = EncodeContext(tuple(tensor.shape), rank, size, seed, crc32(name.encode()))
        method = self.method_of(name)
        compressor, memory = method.choice(tensor, self.min_numel)
        if self.sends_updates:
            memory = LocalUpdate(self._rule_of(name), memory, ctx.shape)
        elif self.rules:
            # The exchange changes no moment, so there is nothing to undo.
            memory, reversible = MeanUpdate(self._rule_of(name)), False
        aggregator = self.wrap(method.exchange, compressor)
        return Lane(name, compressor, aggregator, memory, ctx, tensor.device, reversible)

    def _may_cut(self, name: str, tensor: Tensor) -> bool:
        """Returns whether a parameter is compressed, and its update rule allows chunks."""
        if self.updates_mean or (self.rules and not self._rule_of(name).may_cut):
            return False
        return self.method_of(name).compresses(tensor, self.min_numel)

    def _rule_of(self, lane: str) -> UpdateRule:
        """Returns the update rule of a lane: that of its parameter, whose chunk it may be."""
        return self._rule_by_name[_parameter_of(lane, self._rule_by_name)]

    def message_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Returns the approximate length of one rank's messages of parameters of the default."""
        chosen = ((self.default.choice(tensor, self.min_numel)[0], tensor) for tensor in tensors)
        return sum(compressor.nbytes(tensor.shape) for compressor, tensor in chosen)

    def check(self, compressor: Compressor) -> None:
        """Raises ConfigError if this compressor cannot go with the plan's memory and exchange."""
        check_memory(compressor, self.memory)
        check_exchange(compressor, self.memory, self.exchange)

    @cached_property
    def is_dense(self) -> bool:
        """True if gradients are sent as they are, so that nothing is left to keep."""
        return all(method.is_dense for method in self.methods)

    @cached_property
    def is_plain_mean(self) -> bool:
        """True if all that happens to gradients is their mean, which any all-reduce computes."""
        means = all(method.exchange.name == "mean" for method in self.methods)
        return self.is_dense and means and not self.sends_updates

    @cached_property
    def sends_updates(self) -> bool:
        """True if every worker sends the update that it computes from its own gradient."""
        return bool(self.rules) and not self.updates_mean

    @cached_property
    def propagates_nonfinite(self) -> bool:
        """True if a non-finite gradient of any rank always makes the result non-finite."""
        return self.is_dense and all(m.exchange.aggregate == "mean" for m in self.methods)

    @cached_property
    def _rule_by_name(self) -> dict[str, UpdateRule]:
        return dict(self.rules)

    @cached_property
    def counts_votes(self) -> bool:
        """True if a gradient becomes a majority of signs instead of a mean."""
        return any(method.counts_votes for method in self.methods)

    @cached_property
    def has_rounds(self) -> bool:
        """True if a method defines its own rounds."""
        return any(isinstance(method.compressor, MultiRound) for method in self.methods)

    @property
    def node(self) -> int | None:
        """Ranks per node, the same for all methods; None if exchanges have one level."""
        return self.methods[0].exchange.node

    def tolerated(self, ranks: int) -> int:
        """Returns how many ranks may send arbitrary values without effect on any parameter."""
        return min(method.exchange.tolerated(ranks) for method in self.methods)

    def describe(self) -> dict[str, str]:
        """Returns the method, memory and exchange as specs, for statistics and logs."""
        names = dict.fromkeys(rule.name for _, rule in self.rules)
        memories = dict.fromkeys(format_spec(method.memory) for method in self.methods)
        exchanges = dict.fromkeys(str(method.exchange) for method in self.methods)
        return {
            "spec": self.spec(),
            "memory": " and ".join(memories),
            "exchange": " and ".join(exchanges),
            **({"update": " and ".join(names)} if self.sends_updates else {}),
        }

    def spec(self) -> str:
        """Returns the spec of the method, or the policies as text."""
        if self.policies:
            return str(Policies(tuple(entry.policy for entry in self.policies)))
        return format_spec(self.compressor)

    def identity(self) -> dict[str, object]:
        """Returns classes and all parameters, defaults included, which ranks and states compare."""
        chosen = self.default.identity()
        if self.policies:
            # Numbered, since the first match counts.
            named = [(entry.policy.pattern, entry.method) for entry in self.policies]
            chosen = {f"policy {i} {p!r}": m.identity() for i, (p, m) in enumerate(named)}
        return {
            **chosen,
            **({"updates": self._rules_identity()} if self.rules else {}),
            "chunk_bytes": self.chunk_bytes,
        }

    def _rules_identity(self) -> dict[str, object]:
        """Returns the different rules, and a checksum of which parameter has which."""
        rules = list(dict.fromkeys(rule for _, rule in self.rules))
        places = [f"{name} {rules.index(rule)}" for name, rule in self.rules]
        found: dict[str, object] = {str(i): identity_of(rule) for i, rule in enumerate(rules)}
        parameters = crc32(" ".join(places).encode())
        return {**found, "parameters": parameters, "of mean": self.updates_mean}

    def code_digests(self) -> dict[str, str]:
        """Returns digests of the code of classes outside the package, which ranks compare."""
        rules = {rule for _, rule in self.rules}
        found: dict[str, str] = {}
        for method in self.methods:
            found |= method.code_digests()
        for rule in rules:
            found |= code_digests(rule)
        return found


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
        return config
    if size % config.node:
        raise ConfigError(
            f"{config.name}: {size} ranks do not make nodes of {config.node}; "
            "node must divide the number of ranks"
        )
    between = config.between or choose_exchange(compressor, memory, tensors, size // config.node)
    return replace(config, between=between)


def _parameter_of(lane: str, known: Mapping[str, object]) -> str:
    """Returns the name of a lane's parameter: the lane may be one of its chunks, "name[0:5]"."""
    while lane not in known:
        lane = lane[: lane.rindex("[")]
    return lane


def wants_residual(compressor: Compressor) -> bool:
    """Returns whether a method needs error feedback to converge: biased, and far from the input."""
    traits = compressor.traits()
    if traits.accumulates:
        return True
    return traits.contraction and not traits.unbiased and not traits.suits_small_tensors


def check_memory(compressor: Compressor, memory: Memory) -> None:
    """Raises ConfigError, with what would be legal, if the compressor does not suit the memory."""
    reason = _memory_refusal(compressor, memory)
    if reason is not None:
        others = [
            name
            for name, cls in memory_classes().items()
            if _memory_refusal(compressor, cls(**cls.examples[0])) is None
        ]
        raise ConfigError(
            f"{format_spec(compressor)} does not go with memory {name_of(memory)!r}{reason}"
            f"{_advice('memory', others)}"
        )


def _memory_refusal(compressor: Compressor, memory: Memory) -> str | None:
    traits = compressor.traits()
    if traits.accumulates:
        if memory.separates_residual:
            return None
        return (
            ": it compares a gradient with the residual, which that memory does not keep separate "
            "from it"
        )
    if memory.needs_contraction and not traits.contraction:
        return f", which needs a contraction: {traits.why_not or 'it is none'}"
    return None


def check_exchange(compressor: Compressor, memory: Memory, exchange: ExchangeConfig | str) -> None:
    """Raises ConfigError, with what would be legal, if messages cannot go through the exchange."""
    whole = exchange_of(exchange)
    config = whole.across_nodes
    reason = _exchange_refusal(compressor, memory, config)
    if reason is not None:
        one_level = [
            n for n, c in exchange_classes().items() if not issubclass(c, TwoLevelExchange)
        ]
        others = [
            name
            for name in one_level
            if _exchange_refusal(compressor, memory, ExchangeConfig(name)) is None
        ]
        raise ConfigError(
            f"{format_spec(compressor)} does not go with exchange '{config}': {reason}"
            f"{_advice('exchange' if whole.node is None else 'between', others)}"
        )


def _exchange_refusal(compressor: Compressor, memory: Memory, config: ExchangeConfig) -> str | None:
    reason = find_exchange(config.name).refuses(compressor)
    if reason is None and isinstance(compressor, MultiRound) and config.settings:
        reason = "it defines its own rounds, which do not have this setting"
    if reason is None and config.name == "mean" and _loses_sums(compressor, memory):
        reason = f"sums in 16 bits lose what memory {name_of(memory)!r} cannot see"
    return reason


def _advice(noun: str, names: Sequence[str]) -> str:
    """Returns the end of an error text that lists what would be legal."""
    *others, last = [repr(name) for name in names] or [""]
    return f"; use {noun} {', '.join(others)}{' or ' if others else ''}{last}" if last else ""


def _loses_sums(compressor: Compressor, memory: Memory) -> bool:
    return memory.needs_contraction and compressor.traits().rounds_sums


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
    if compressor.traits().summable and not _loses_sums(compressor, memory):
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
