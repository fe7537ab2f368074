"""The plan: the compressor, memory and exchange of each parameter, and what combines legally."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias
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
from gradwire.spec import (
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


@dataclass(frozen=True)
class Plan:
    """A legal choice for all parameters; small and one-dimensional tensors are sent dense."""

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

    def in_chunks(self, tensors: Mapping[str, Tensor], chunk_bytes: int) -> "Plan":
        """Returns the plan with chunks of this size; raises ConfigError if a parameter forbids it.

        A size of 0 means that no parameter is cut.
        """
        if chunk_bytes:
            compressed = {n: t for n, t in tensors.items() if self._may_cut(n, t)}
            check_chunk_bytes(self.compressor, compressed, chunk_bytes)
        return replace(self, chunk_bytes=chunk_bytes)

    def chunks(self, name: str, tensor: Tensor) -> list[Chunk]:
        """Returns the chunks of one parameter; none if it is not cut, or is sent dense."""
        if not self.chunk_bytes or not self._may_cut(name, tensor):
            return []
        return cut(name, tensor, self.compressor.traits().block, self.chunk_bytes)

    def lane(
        self, name: str, tensor: Tensor, rank: int, size: int, seed: int, reversible: bool = True
    ) -> Lane:
        """Returns the lane of one parameter."""
        if tensor.dtype not in DENSE:
            raise ConfigError(f"parameter {name!r} is {tensor.dtype}; expected {[*DENSE]}")
        ctx = EncodeContext(tuple(tensor.shape), rank, size, seed, crc32(name.encode()))
        compressor, memory = self._choice(tensor)
        if self.sends_updates:
            memory = LocalUpdate(self._rule_of(name), memory, ctx.shape)
        elif self.rules:
            # The exchange changes no moment, so there is nothing to undo.
            memory, reversible = MeanUpdate(self._rule_of(name)), False
        aggregator = self.wrap(self.exchange, compressor)
        return Lane(name, compressor, aggregator, memory, ctx, tensor.device, reversible)

    def _may_cut(self, name: str, tensor: Tensor) -> bool:
        """Returns whether a parameter is compressed, and its update rule allows chunks."""
        if self.updates_mean or (self.rules and not self._rule_of(name).may_cut):
            return False
        # `lane` refuses other dtypes.
        return tensor.dtype in DENSE and self._choice(tensor)[0] is self.compressor

    def _rule_of(self, lane: str) -> UpdateRule:
        """Returns the update rule of a lane: that of its parameter, whose chunk it may be."""
        rules = self._rule_by_name
        while lane not in rules:
            lane = lane[: lane.rindex("[")]
        return rules[lane]

    def _choice(self, tensor: Tensor) -> tuple[Compressor, Memory]:
        dense = DENSE[tensor.dtype]
        if self.is_dense:
            # Everything is sent, so there is no residual.
            return dense, NoMemory()
        if self.compressor.traits().suits_small_tensors:
            return self.compressor, self.memory
        small = tensor.dim() < 2 or tensor.numel() < self.min_numel
        if small or self.compressor.nbytes(tensor.shape) >= tensor.nbytes:
            return dense, NoMemory()
        return self.compressor, self.memory

    def message_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Returns the approximate length of one rank's messages of these parameters."""
        return sum(self._choice(tensor)[0].nbytes(tensor.shape) for tensor in tensors)

    def check(self, compressor: Compressor) -> None:
        """Raises ConfigError if this compressor cannot go with the plan's memory and exchange."""
        check_memory(compressor, self.memory)
        check_exchange(compressor, self.memory, self.exchange)

    @cached_property
    def is_dense(self) -> bool:
        """True if gradients are sent as they are, so that nothing is left to keep."""
        return isinstance(self.compressor, NoCompression)

    @cached_property
    def is_plain_mean(self) -> bool:
        """True if all that happens to gradients is their mean, which any all-reduce computes."""
        return self.is_dense and self.exchange.name == "mean" and not self.sends_updates

    @cached_property
    def sends_updates(self) -> bool:
        """True if every worker sends the update that it computes from its own gradient."""
        return bool(self.rules) and not self.updates_mean

    @cached_property
    def propagates_nonfinite(self) -> bool:
        """True if a non-finite gradient of any rank always makes the result non-finite."""
        return self.is_dense and self.exchange.aggregate == "mean"

    @cached_property
    def _rule_by_name(self) -> dict[str, UpdateRule]:
        return dict(self.rules)

    @cached_property
    def counts_votes(self) -> bool:
        """True if the gradient becomes a majority of signs instead of a mean."""
        return self.compressor.traits().is_vote or self.exchange.aggregate == "majority"

    def describe(self) -> dict[str, str]:
        """Returns the method, memory and exchange as specs, for statistics and logs."""
        names = dict.fromkeys(rule.name for _, rule in self.rules)
        return {
            "spec": format_spec(self.compressor),
            "memory": format_spec(self.memory),
            "exchange": str(self.exchange),
            **({"update": " and ".join(names)} if self.sends_updates else {}),
        }

    def identity(self) -> dict[str, object]:
        """Returns classes and all parameters, defaults included, which ranks and states compare."""
        return {
            "compressor": identity_of(self.compressor),
            "memory": identity_of(self.memory),
            "exchange": self.exchange.identity(),
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
        found = {**code_digests(self.compressor), **code_digests(self.memory)}
        for rule in rules:
            found |= code_digests(rule)
        return found


def make_plan(
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: ExchangeConfig | str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """Chooses what was left open, and refuses what cannot work."""
    compressor = compressor_of(compressor)
    if memory is None:
        memory = "residual" if wants_residual(compressor) else "none"
    memory = memory_of(memory)
    check_memory(compressor, memory)
    config = _resolved(compressor, memory, exchange, tensors, size)
    check_exchange(compressor, memory, config)
    return Plan(compressor, memory, config)


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
