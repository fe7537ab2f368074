"""Cases of the conformance suite: one parameter, among ranks that are simulated in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from gradwire.base import Compressor, Exchange, Memory
from gradwire.comm.simulated import Simulated
from gradwire.engine.legality import check_exchange, check_memory
from gradwire.engine.make_plan import make_plan, open_lane
from gradwire.engine.step import Lane, lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds
from gradwire.spec import (
    ExchangeConfig,
    exchange_classes,
    format_spec,
    memory_classes,
    parse_exchange,
)
from gradwire.types import EncodeContext

RANKS = 3


class ConformanceError(AssertionError):
    """A method lacks a property that the library relies on; the text names it."""


def expect(holds: bool, otherwise: str) -> None:
    """Raises ConformanceError unless a condition holds."""
    if not holds:
        raise ConformanceError(otherwise)


@dataclass(frozen=True)
class Case:
    """A compressor with a memory and an exchange."""

    compressor: Compressor
    memory: Memory
    exchange: ExchangeConfig

    def __str__(self) -> str:
        return f"{self.spec}-{format_spec(self.memory)}-{self.exchange}"

    @property
    def spec(self) -> str:
        return format_spec(self.compressor)

    @property
    def ranks(self) -> int:
        """The number of ranks: two nodes if the exchange has nodes."""
        node = self.exchange.node
        return RANKS if node is None else 2 * node

    def lanes(self, like: Tensor, seed: int = 0) -> list[Lane]:
        """Returns one lane per rank, without a plan, so that edge sizes reach the method itself."""
        contexts = [
            EncodeContext(tuple(like.shape), rank, self.ranks, seed) for rank in range(self.ranks)
        ]
        return [
            open_lane("w", self.compressor, self.memory, self.exchange, ctx, like.device)
            for ctx in contexts
        ]

    def why_not(self) -> str | None:
        """Returns the reason why the plan refuses it, or None."""
        try:
            check_memory(self.compressor, self.memory)
            check_exchange(self.compressor, self.memory, self.exchange)
        except ConfigError as error:
            return str(error)
        return None


def usual_case(compressor: Compressor) -> Case:
    """Returns the case of a compressor as `attach` would use it."""
    plan = make_plan(compressor, None, "auto", [torch.zeros(40, 33)], RANKS)
    return Case(compressor, plan.memory, plan.exchange)


def own_memories() -> list[Memory]:
    """Returns the memories of this package, in all their example settings."""
    return [cls(**example) for cls in memory_classes().values() for example in cls.examples]


def own_exchanges() -> list[ExchangeConfig]:
    """Returns the exchanges of this package, in all their example settings."""
    found: list[ExchangeConfig] = []
    for name, cls in exchange_classes().items():
        found += exchange_examples(name, cls)
    return found


def exchange_examples(name: str, cls: type[Exchange]) -> list[ExchangeConfig]:
    """Returns an exchange in all its example settings."""
    texts = [",".join(f"{k}={v}" for k, v in example.items()) for example in cls.examples]
    return [parse_exchange(f"{name}:{text}" if text else name) for text in texts]


def combinations(
    compressor: Compressor,
    memories: Sequence[Memory] | None = None,
    exchanges: Sequence[ExchangeConfig] | None = None,
) -> Iterator[Case]:
    """Yields a compressor with every memory and exchange, legal or not."""
    memories = own_memories() if memories is None else memories
    exchanges = own_exchanges() if exchanges is None else exchanges
    for memory, exchange in product(memories, exchanges):
        is_vote = compressor.traits().is_vote and str(exchange) == "gather"
        majority = parse_exchange("gather:aggregate=majority")
        yield Case(compressor, memory, majority if is_vote else exchange)


def gradients(
    shape: Sequence[int],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    ranks: int = RANKS,
) -> list[Tensor]:
    """Returns a gradient for each rank, of normal entries."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for _ in range(ranks)]


def run_step(lanes: Sequence[Lane], grads: Sequence[Tensor]) -> list[Tensor]:
    """Runs one exchange among simulated ranks; returns the gradient of each rank afterwards."""
    network = Simulated(len(lanes))
    outs = [g.clone() for g in grads]
    network.run([run_rounds([lane_rounds(g, lane)]) for g, lane in zip(outs, lanes, strict=True)])
    for lane in lanes:
        lane.commit()
    return outs


def mean_unsent(case: Case, lanes: Sequence[Lane]) -> Tensor:
    """Returns the mean of what the ranks keep to send, and of what they keep of shards."""
    residual = torch.zeros(lanes[0].ctx.numel)
    for lane in lanes:
        kept = lane.memory.unsent(lane.memory_state)
        if kept is not None:
            residual += kept / len(lanes)
    senders = lanes[:: case.exchange.node or 1]
    for lane, (start, stop) in zip(senders, bounds(residual.numel(), len(senders)), strict=True):
        waiting = {*lane.aggregator.sharded_keys} & {*lane.aggregator.unsent_keys}
        for key in waiting & lane.aggregator_state.keys():
            residual[start:stop] += lane.aggregator_state[key]
    return residual
