"""Hierarchical: dense inside a node, where links are fast; compressed between nodes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.base import Layered, Talker
from gradwire.types import Between, Given, Inside, Mean, Mixed, Rounds, State, Turn


@dataclass(frozen=True)
class HierarchicalExchange(Layered):
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

    talker: Talker
    node: int

    examples: ClassVar = (
        {"node": 2, "between": "gather"},
        {"node": 2, "between": "sharded"},
        {"node": 2, "between": "mean"},
    )

    def state(self, turn: Turn, device: torch.device) -> State:
        return self.talker.state(self._of_node(turn), device)

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        own = given.total()
        # An all-reduce overwrites what it is given, and what comes later may be refused.
        [(mean,)] = yield Mean((own.clone(),), Inside(self.node))
        # As a residual of nothing, so that it is still there to see what was said of it.
        whole = Given(mean) if given.left is None else _as_residual(mean)
        talk = self.talker.rounds(whole, state, self._of_node(turn))
        out = yield from _between(talk, self._scope(turn))
        if given.left is not None:
            assert whole.left is not None
            given.left.copy_(torch.where(whole.left == mean, own, whole.left))
        return out

    def _of_node(self, turn: Turn) -> Turn:
        """The turn of this rank's node among the nodes."""
        return turn._replace(rank=turn.rank // self.node, size=turn.size // self.node)

    def _scope(self, turn: Turn) -> Between:
        return Between(self.node, turn.size // self.node, turn.rank % self.node)


def _as_residual(mean: torch.Tensor) -> Given:
    return Mixed(torch.zeros_like(mean), mean, torch.empty_like(mean))


def _between(talk: Rounds, scope: Between) -> Rounds:
    """The same conversation, held by nodes."""
    try:
        request = next(talk)
        while True:
            request = talk.send((yield replace(request, scope=scope)))
    except StopIteration as end:
        out: torch.Tensor = end.value
        return out
