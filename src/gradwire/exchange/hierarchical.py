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
    """Averages each node in float32, then the nodes by the exchange that `between` names.

    A node is `node` consecutive ranks and acts as one rank: after an all-reduce inside, its ranks
    hold the same tensor, draw the same random numbers and encode the same messages. Each transfers
    one share of their bytes to the ranks at its place in other nodes, and the ranks of a node
    exchange what they received (`comm/internode.py`). So the traffic between nodes is that of
    `between` among so few ranks, spread over all links of a node; what is distributed inside is
    still compressed; and a method sees whole tensors, not shards. A reduce-scatter would avoid
    encoding the same tensor on every rank of a node, but on gloo it costs as much as an all-reduce,
    and the dense result would have to be gathered inside. One leader per node would leave the links
    of other ranks idle.

    For entries that a node has sent, its ranks share the residual of the node's mean; for others
    each rank keeps its own, so that memories see which entries were sent. Either way the mean of
    the ranks' residuals is the residual of the nodes.
    """

    aggregator: Aggregator
    node: int

    examples: ClassVar = (
        {"node": 2, "between": "gather"},
        {"node": 2, "between": "sharded"},
        {"node": 2, "between": "mean"},
    )

    @property
    def propagates_nonfinite(self) -> bool:
        """True: the first message is the whole input."""
        return True

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return self.aggregator.state(self._of_node(ctx), device)

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        own = ef.total()
        # A clone: an all-reduce overwrites its input, and the step may still be discarded.
        [(mean,)] = yield Mean((own.clone(),), IntraNode(self.node))
        # As a residual with a zero gradient, so that it is still there to compare with.
        whole = EFInput(mean) if ef.residual_out is None else _as_residual(mean)
        rounds = self.aggregator.rounds(whole, state, self._of_node(ctx))
        out = yield from _in_scope(rounds, self._scope(ctx))
        if ef.residual_out is not None:
            assert whole.residual_out is not None
            ef.residual_out.copy_(torch.where(whole.residual_out == mean, own, whole.residual_out))
        return out

    def _of_node(self, ctx: EncodeContext) -> EncodeContext:
        """Returns the context of this rank's node among the nodes."""
        return ctx._replace(rank=ctx.rank // self.node, world_size=ctx.world_size // self.node)

    def _scope(self, ctx: EncodeContext) -> InterNode:
        return InterNode(self.node, ctx.world_size // self.node, ctx.rank % self.node)


def _as_residual(mean: torch.Tensor) -> EFInput:
    return CombinedInput(torch.zeros_like(mean), mean, torch.empty_like(mean))


def _in_scope(rounds: Rounds, scope: InterNode) -> Rounds:
    """Runs rounds with all requests in this scope."""
    try:
        request = next(rounds)
        while True:
            request = rounds.send((yield replace(request, scope=scope)))
    except StopIteration as end:
        out: torch.Tensor = end.value
        return out
