"""The plan: the compressor, memory and exchange of each parameter of a model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory, MultiRound, OneRound, UpdateRule
from gradwire.comm.meter import ring_bytes
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.engine.chunks import Chunk, check_chunk_bytes, cut
from gradwire.engine.legality import check_exchange, check_memory
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.identity import code_digests, identity_of
from gradwire.memory._update import LocalUpdate, MeanUpdate
from gradwire.memory.none import NoMemory
from gradwire.policies import Policies, Policy
from gradwire.spec import POLICY_DEFAULT, ExchangeConfig, find_exchange, format_spec
from gradwire.types import EncodeContext

DENSE: dict[torch.dtype, OneRound] = {
    torch.float32: NoCompression(),
    torch.bfloat16: Bf16(),
    torch.float16: Fp16(),
}
"""Compressors that send a tensor as it is, in its own dtype."""

Wrap: TypeAlias = Callable[[ExchangeConfig, Compressor], Aggregator]
"""Builds the aggregator of a lane from an exchange and a compressor."""


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


def _parameter_of(lane: str, known: Mapping[str, object]) -> str:
    """Returns the name of a lane's parameter: the lane may be one of its chunks, "name[0:5]"."""
    while lane not in known:
        lane = lane[: lane.rindex("[")]
    return lane
