"""Hierarchical: dense inside a node, where links are fast; compressed between nodes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.base import Aggregator, TwoLevelExchange
from gradwire.types import (
    CombinedInput,
    EFInput,
    EncodeContext,
    InterNode,
    IntraNode,
    Mean,
    Rounds,
    State,
)


@dataclass(frozen=True)
class HierarchicalExchange(TwoLevelExchange):
    """The mean of each node in float32, then whatever exchange `between` names, among the nodes.

    A node is `node` consecutive ranks, and talks to the others as if it were one rank: after an
    all-reduce inside, its ranks know the same, draw the same random numbers and make the same
    messages. Each carries one share of their bytes across to the ranks at its place in other nodes,
    and the ranks of a node tell each other what came (`comm/internode.py`). So what crosses between
    nodes is what `between` sends among so few ranks, spread over all links of a node; what is
    distributed inside again is still compressed; and a method sees whole tensors, not shards. A
    reduce-scatter instead would spare encoding the same thing on every rank of a node, but on gloo
    it costs as much as an all-reduce, and then the dense result has to be gathered inside. One
    leader a node would leave the other ranks' links idle.

    Where a node has said something, its ranks share what is left of the node's mean; elsewhere each
    keeps its own, so that memories see which entries were sent. Either way the mean of what ranks
    keep is what nodes have not said.
    """

    aggregator: Aggregator
    node: int

    examples: ClassVar = (
        {"node": 2, "between": "gather"},
        {"node": 2, "between": "sharded"},
        {"node": 2, "between": "mean"},
    )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return self.aggregator.state(self._of_node(ctx), device)

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        own = ef.total()
        # An all-reduce overwrites what it is given, and what comes later may be refused.
        [(mean,)] = yield Mean((own.clone(),), IntraNode(self.node))
        # As a residual of nothing, so that it is still there to see what was said of it.
        whole = EFInput(mean) if ef.residual_out is None else _as_residual(mean)
        talk = self.aggregator.rounds(whole, state, self._of_node(ctx))
        out = yield from _between(talk, self._scope(ctx))
        if ef.residual_out is not None:
            assert whole.residual_out is not None
            ef.residual_out.copy_(torch.where(whole.residual_out == mean, own, whole.residual_out))
        return out

    def _of_node(self, ctx: EncodeContext) -> EncodeContext:
        """The turn of this rank's node among the nodes."""
        return ctx._replace(rank=ctx.rank // self.node, world_size=ctx.world_size // self.node)

    def _scope(self, ctx: EncodeContext) -> InterNode:
        return InterNode(self.node, ctx.world_size // self.node, ctx.rank % self.node)


def _as_residual(mean: torch.Tensor) -> EFInput:
    return CombinedInput(torch.zeros_like(mean), mean, torch.empty_like(mean))


def _between(talk: Rounds, scope: InterNode) -> Rounds:
    """The same conversation, held by nodes."""
    try:
        request = next(talk)
        while True:
            request = talk.send((yield replace(request, scope=scope)))
    except StopIteration as end:
        out: torch.Tensor = end.value
        return out
