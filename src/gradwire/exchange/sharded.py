"""Sharded: every rank averages one shard of the tensor, and tells the others the result."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from gradwire.base import Compressor, Exchange, OneRound, carried_by, take
from gradwire.types import Gather, Given, Rounds, Scatter, State, Turn, mix


@dataclass(frozen=True)
class ShardedExchange(Exchange):
    """All-to-all of encoded shards, decode and sum, encode the mean again, all-gather.

    About two messages pass through each rank's link, whatever N, where a gather takes N-1. The
    second encoding has an error of its own, which a residual on the averaging rank feeds back where
    the method is a contraction. Shards differ by at most one element; there is no padding.
    """

    codec: OneRound

    units: ClassVar = ("server",)
    shards: ClassVar = ("server",)
    owed: ClassVar = ("server",)

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if codec.traits().votes:
            return "votes must be counted all at once"
        return carried_by("sharded", codec)

    @property
    def shows(self) -> bool:
        return self.codec.traits().shows

    def state(self, turn: Turn, device: torch.device) -> State:
        if not self.codec.traits().contraction:
            return {}
        start, stop = bounds(turn.numel, turn.size)[turn.rank]
        return {"server": torch.zeros(stop - start, device=device)}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        mine = yield from own_shard(self.codec, given, turn)
        shards, turns = bounds(turn.numel, turn.size), shard_turns(turn)
        layouts = [self.codec.layout(shard.numel) for shard in turns]
        server = state.get("server")
        rest = None if server is None else torch.empty_like(server)
        # The second encoding draws numbers of its own, but shares the choices that all ranks share.
        again = [shard._replace(rank=turn.size + i) for i, shard in enumerate(turns)]
        parts = take(self.codec, Given(mine, server, rest), again[turn.rank])
        answers = yield Gather(parts, layouts[turn.rank], layouts)
        if rest is not None:
            state["server"] = rest
        out = given.x.zero_()
        if not turn.listens:
            return out
        for (start, stop), parts, shard in zip(shards, answers, again, strict=True):
            self.codec.add_to(out[start:stop], [parts], 1.0, shard)
        return out


def bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """The shards of `numel` elements, as (start, stop), one a rank."""
    edges = [numel * rank // size for rank in range(size + 1)]
    return list(pairwise(edges))


def shard_turns(turn: Turn) -> list[Turn]:
    """The turns of all shards; each draws random numbers of its own."""
    return [
        turn._replace(shape=(stop - start,), seed=mix(turn.seed, shard))
        for shard, (start, stop) in enumerate(bounds(turn.numel, turn.size))
    ]


def own_shard(codec: OneRound, given: Given, turn: Turn) -> Rounds:
    """Tells every rank its shard, and returns the mean of this rank's."""
    turns = shard_turns(turn)
    messages = [
        take(codec, given.slice(start, stop), shard)
        for (start, stop), shard in zip(bounds(turn.numel, turn.size), turns, strict=True)
    ]
    heard = yield Scatter(messages, [codec.layout(shard.numel) for shard in turns], turn.rank)
    mine = torch.zeros(turns[turn.rank].numel, device=given.x.device)
    codec.add_to(mine, heard, 1 / turn.size, turns[turn.rank])
    return mine
