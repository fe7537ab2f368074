"""Which compressor, memory and exchange for which parameter."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory, MultiRound, OneRound
from gradwire.base.aggregation import borne
from gradwire.comm.cost_model import LinkModel
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.auto import choose
from gradwire.memory.none import NoMemory
from gradwire.spec import (
    compressor_of,
    find_exchange,
    find_layers,
    format_spec,
    memory_of,
    name_of,
    read_settings,
    wrap_in_exchange,
)
from gradwire.types import EncodeContext

DENSE: dict[torch.dtype, OneRound] = {
    torch.float32: NoCompression(),
    torch.bfloat16: Bf16(),
    torch.float16: Fp16(),
}
"""How a tensor travels uncompressed: in the number format that it has."""

BUCKET_BYTES = 25 << 20
"""The size of DDP's buckets, which is what one message says."""

Wrap: TypeAlias = Callable[[str, Compressor], Aggregator]
"""An exchange's spec and a compressor to what talks."""


@dataclass(frozen=True)
class Plan:
    """A legal choice for all parameters; tensors below `min_numel` or of one dimension go dense."""

    compressor: Compressor
    memory: Memory
    exchange: str
    min_numel: int = 1024
    wrap: Wrap = wrap_in_exchange
    """Who holds the conversation; a mount that needs only a part of the mean has its own."""

    def lane(
        self, name: str, tensor: Tensor, rank: int, size: int, seed: int, careful: bool = True
    ) -> Lane:
        """The way of one parameter."""
        if tensor.dtype not in DENSE:
            raise ConfigError(f"parameter {name!r} is {tensor.dtype}; expected {[*DENSE]}")
        ctx = EncodeContext(tuple(tensor.shape), rank, size, seed, crc32(name.encode()))
        compressor, memory = self._choice(tensor)
        device, wrap = tensor.device, self.wrap
        return open_lane(name, compressor, memory, self.exchange, ctx, device, careful, wrap)

    def _choice(self, tensor: Tensor) -> tuple[Compressor, Memory]:
        dense = DENSE[tensor.dtype]
        if self.is_dense():
            # All is said, so there is nothing to keep.
            return dense, NoMemory()
        if self.compressor.traits().suits_small_tensors:
            return self.compressor, self.memory
        small = tensor.dim() < 2 or tensor.numel() < self.min_numel
        if small or self.compressor.nbytes(tensor.shape) >= tensor.nbytes:
            return dense, NoMemory()
        return self.compressor, self.memory

    def check(self, compressor: Compressor) -> None:
        """Raises ConfigError unless this one, too, may go with the memory and the exchange."""
        check_memory(compressor, self.memory)
        check_exchange(compressor, self.memory, self.exchange)

    def is_dense(self) -> bool:
        """Whether all gradients are their own messages, of which nothing is left to keep."""
        return isinstance(self.compressor, NoCompression)

    def counts_votes(self) -> bool:
        """Whether the gradient becomes a majority of signs instead of a mean."""
        return self.compressor.traits().is_vote or self.exchange.endswith("aggregate=majority")

    def node(self) -> int | None:
        """Ranks a node, where that matters."""
        layers = find_layers(self.exchange)
        return None if layers is None else layers.node

    def bears(self, ranks: int) -> int:
        """How many ranks may have gradients that are not finite, and the step counts without."""
        layers = find_layers(self.exchange)
        if layers is not None:
            # A node with such a rank is lost as a whole.
            return replace(self, exchange=layers.between).bears(ranks // layers.node)
        _, settings = read_settings(self.exchange)
        return borne(settings.get("aggregate", "mean"), ranks)

    def describe(self) -> dict[str, str]:
        return {
            "spec": format_spec(self.compressor),
            "memory": format_spec(self.memory),
            "exchange": self.exchange,
        }


def make_plan(
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """Fills in what was left open, and refuses what cannot work."""
    compressor = compressor_of(compressor)
    if memory is None:
        memory = "residual" if wants_residual(compressor) else "none"
    memory = memory_of(memory)
    check_memory(compressor, memory)
    exchange = settle_exchange(compressor, memory, exchange, tensors, size)
    check_exchange(compressor, memory, exchange)
    return Plan(compressor, memory, exchange)


def settle_exchange(
    compressor: Compressor, memory: Memory, exchange: str, tensors: Iterable[Tensor], size: int
) -> str:
    """The exchange with nothing left open, for so many ranks."""
    if exchange == "auto":
        return choose_exchange(compressor, memory, tensors, size)
    layers = find_layers(exchange)
    if layers is None:
        return exchange
    if size % layers.node:
        raise ConfigError(
            f"{layers.exchange}: {size} ranks do not make nodes of {layers.node}; "
            "node must divide the number of ranks"
        )
    between = settle_exchange(compressor, memory, layers.between, tensors, size // layers.node)
    return str(replace(layers, between=between))


def wants_residual(compressor: Compressor) -> bool:
    """Whether a method needs error feedback to converge: biased, and far from the input."""
    traits = compressor.traits()
    if traits.accumulates:
        return True
    return traits.contraction and not traits.unbiased and not traits.suits_small_tensors


def check_memory(compressor: Compressor, memory: Memory) -> None:
    traits = compressor.traits()
    if traits.accumulates and memory.separates_residual:
        return
    if traits.accumulates:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with memory {name_of(memory)!r}: it compares a "
            "gradient with what waits of those before it, which that memory does not keep apart "
            "(use residual or lowbit)"
        )
    if memory.needs_contraction and not traits.contraction:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with memory {name_of(memory)!r}, which needs a "
            f"contraction: {traits.why_not or 'it is none'}"
        )


def check_exchange(compressor: Compressor, memory: Memory, exchange: str) -> None:
    if layers := find_layers(exchange):
        check_exchange(compressor, memory, layers.between)
        return
    why = find_exchange(exchange).refuses(compressor)
    if why is None and isinstance(compressor, MultiRound) and ":" in exchange:
        why = "it talks in rounds of its own, which know no such setting"
    if why is None and exchange == "mean" and _rounds_unseen(compressor, memory):
        why = f"sums in 16 bits lose what memory {name_of(memory)!r} cannot see; use gather"
    if why is not None:
        raise ConfigError(
            f"{format_spec(compressor)} does not go with exchange {exchange!r}: {why}"
        )


def _rounds_unseen(compressor: Compressor, memory: Memory) -> bool:
    return memory.needs_contraction and compressor.traits().rounds_sums


def choose_exchange(
    compressor: Compressor, memory: Memory, tensors: Iterable[Tensor], size: int
) -> str:
    """Mean where messages add up; otherwise what a bucket's message suggests, alike for all lanes.

    One exchange for all, so that the lanes of a bucket share their rounds.
    """
    if isinstance(compressor, MultiRound):
        return compressor.rounds_like
    if compressor.traits().is_vote:
        return "gather:aggregate=majority"
    if compressor.traits().summable and not _rounds_unseen(compressor, memory):
        return "mean"
    tensors = list(tensors)
    dense_bytes = sum(t.nbytes for t in tensors)
    nbytes = sum(compressor.nbytes(t.shape) if t.dim() > 1 else t.nbytes for t in tensors)
    buckets = max(1, round(dense_bytes / BUCKET_BYTES))
    sparse = compressor.family in ("sparsification", "hybrid")
    return choose(nbytes // buckets, size, LinkModel(), sparse=sparse)


def open_lane(
    name: str,
    compressor: Compressor,
    memory: Memory,
    exchange: str,
    ctx: EncodeContext,
    device: torch.device,
    careful: bool = True,
    wrap: Wrap = wrap_in_exchange,
) -> Lane:
    """A lane as told; `check_memory` and `check_exchange` have passed."""
    aggregator = wrap(exchange, compressor)
    return Lane(name, compressor, aggregator, memory, ctx, device, careful)
