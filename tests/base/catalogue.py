"""All classes of the catalogue folders as cases for the contract tests. No method is named here."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.comm.simulated import Simulated
from gradwire.engine.plan import check_exchange, check_memory, make_plan, open_lane
from gradwire.engine.step import Lane, lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds
from gradwire.spec import (
    compressor_classes,
    exchange_classes,
    format_spec,
    memory_classes,
    parse,
    parse_exchange,
    parse_memory,
)
from gradwire.types import EncodeContext

RANKS = 3


@dataclass(frozen=True)
class Case:
    """A legal combination."""

    spec: str
    memory: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.spec}-{self.memory}-{self.exchange}"

    def lanes(self, like: Tensor, seed: int = 0) -> list[Lane]:
        """Returns one lane per rank, without a plan, so that edge sizes reach the method itself."""
        contexts = [
            EncodeContext(tuple(like.shape), rank, self.ranks, seed) for rank in range(self.ranks)
        ]
        memory = parse_memory(self.memory)
        return [
            open_lane("w", self.compressor(), memory, self.exchange, ctx, like.device)
            for ctx in contexts
        ]

    @property
    def ranks(self) -> int:
        """The number of ranks: two nodes if the exchange has nodes."""
        node = parse_exchange(self.exchange).node
        return RANKS if node is None else 2 * node

    def compressor(self) -> Compressor:
        return parse(self.spec)

    def why_not(self) -> str | None:
        """Returns the reason why the plan refuses it, or None."""
        memory = parse_memory(self.memory)
        try:
            check_memory(self.compressor(), memory)
            check_exchange(self.compressor(), memory, self.exchange)
        except ConfigError as error:
            return str(error)
        return None


def singles() -> list[str]:
    """Returns every method with every one of its example settings."""
    return [
        format_spec(cls(**example))
        for cls in compressor_classes().values()
        for example in cls.examples
    ]


@cache
def pipelines() -> list[str]:
    """Returns every sparsifier followed by every quantiser, each in its usual setting."""
    usual = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
    found = []
    for one, two in product(usual, usual):
        try:
            found.append(format_spec(parse(f"{one} | {two}")))
        except ConfigError:
            continue
    return found


def memories() -> list[str]:
    return [format_spec(cls(**e)) for cls in memory_classes().values() for e in cls.examples]


def exchanges() -> list[str]:
    """Returns every exchange with every one of its example settings."""
    return [
        name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
        for name, cls in exchange_classes().items()
        for example in cls.examples
    ]


@cache
def usual_cases() -> list[Case]:
    """Returns every setting of every method, and every pipeline, as `attach` would use it."""
    cases = []
    for spec in [*singles(), *pipelines()]:
        plan = make_plan(spec, None, "auto", [torch.zeros(40, 33)], RANKS)
        cases.append(Case(spec, format_spec(plan.memory), str(plan.exchange)))
    return cases


def combinations() -> Iterator[Case]:
    """Yields every method in its usual setting with every memory and exchange."""
    usual = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
    for spec, memory, exchange_name in product(usual, memories(), exchanges()):
        is_vote = parse(spec).traits().is_vote and exchange_name.endswith("gather")
        yield Case(
            spec, memory, f"{exchange_name}:aggregate=majority" if is_vote else exchange_name
        )


@cache
def legal_cases() -> list[Case]:
    return [case for case in combinations() if case.why_not() is None]


def illegal_cases() -> list[Case]:
    return [case for case in combinations() if case.why_not() is not None]


def every_usual_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", usual_cases(), ids=str)


def every_legal_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", legal_cases(), ids=str)


def all_specs() -> list[str]:
    return singles() + pipelines()


def every_compressor() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", all_specs())


def run_step(lanes: list[Lane], grads: list[Tensor]) -> tuple[list[Tensor], Simulated]:
    """Runs one exchange among simulated ranks; returns the gradient of each rank afterwards."""
    network = Simulated(len(lanes))
    outs = [g.clone() for g in grads]
    network.run([run_rounds([lane_rounds(g, lane)]) for g, lane in zip(outs, lanes, strict=True)])
    for lane in lanes:
        lane.commit()
    return outs, network


def mean_residual(case: Case, lanes: list[Lane]) -> Tensor:
    """Returns the mean residual of the ranks, plus what averaging ranks or nodes keep of shards."""
    residual = sum(
        (lane.memory_state["residual"] for lane in lanes), torch.zeros(lanes[0].ctx.numel)
    )
    residual = residual / len(lanes)
    node = parse_exchange(case.exchange).node
    senders = lanes[:: node or 1]
    for lane, (start, stop) in zip(senders, bounds(residual.numel(), len(senders)), strict=True):
        if "server" in lane.aggregator_state:
            residual[start:stop] += lane.aggregator_state["server"]
    return residual
