"""Sharded: every rank averages one shard of the tensor, and sends the result to the others."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from gradwire.base import Compressor, Exchange, OneRound, encode_with_feedback, refuses_own_rounds
from gradwire.types import AllGather, AllToAll, EFInput, EncodeContext, Rounds, State, mix


@dataclass(frozen=True)
class ShardedExchange(Exchange):
    """All-to-all of encoded shards, decode and sum, encode the mean again, all-gather.

    About two messages pass through each rank's link for any N, where a gather takes N-1. The second
    encoding has an error of its own; if the method is a contraction, a residual on the averaging
    rank feeds it back. Shards differ by at most one element; there is no padding.
    """

    codec: OneRound

    loss_scaled_keys: ClassVar = ("server",)
    sharded_keys: ClassVar = ("server",)
    unsent_keys: ClassVar = ("server",)

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if codec.traits().is_vote:
            return "votes must be counted on one rank"
        return refuses_own_rounds("sharded", codec)

    @property
    def propagates_nonfinite(self) -> bool:
        return self.codec.traits().propagates_nonfinite

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        traits = self.codec.traits()
        if traits.exact or not traits.contraction:
            return {}
        start, stop = bounds(ctx.numel, ctx.world_size)[ctx.rank]
        return {"server": torch.zeros(stop - start, device=device)}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        mine = yield from own_shard(self.codec, ef, ctx)
        shards, contexts = bounds(ctx.numel, ctx.world_size), shard_contexts(ctx)
        layouts = [self.codec.layout(shard.numel) for shard in contexts]
        server = state.get("server")
        rest = None if server is None else torch.empty_like(server)
        # The second encoding draws its own random numbers, but the shared ones are the same.
        again = [shard._replace(rank=ctx.world_size + i) for i, shard in enumerate(contexts)]
        parts = encode_with_feedback(self.codec, EFInput(mine, server, rest), again[ctx.rank])
        if rest is not None:
            # Before the round, so that the guard's flag about it reaches all ranks with the round.
            state["server"] = rest
        answers = yield AllGather(parts, layouts[ctx.rank], layouts)
        out = ef.grad.zero_()
        if not ctx.wants_mean:
            return out
        for (start, stop), parts, shard in zip(shards, answers, again, strict=True):
            self.codec.decode_add(out[start:stop], [parts], 1.0, shard)
        return out


def bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Returns the shards of `numel` elements as (start, stop), one per rank."""
    edges = [numel * rank // size for rank in range(size + 1)]
    return list(pairwise(edges))


def shard_contexts(ctx: EncodeContext) -> list[EncodeContext]:
    """Returns the contexts of all shards; each draws its own random numbers."""
    return [
        ctx._replace(shape=(stop - start,), seed=mix(ctx.seed, shard))
        for shard, (start, stop) in enumerate(bounds(ctx.numel, ctx.world_size))
    ]


def own_shard(codec: OneRound, ef: EFInput, ctx: EncodeContext) -> Rounds:
    """Sends every rank its shard, and returns the mean of this rank's shard."""
    contexts = shard_contexts(ctx)
    messages = [
        encode_with_feedback(codec, ef.slice(start, stop), shard)
        for (start, stop), shard in zip(bounds(ctx.numel, ctx.world_size), contexts, strict=True)
    ]
    received = yield AllToAll(messages, [codec.layout(shard.numel) for shard in contexts], ctx.rank)
    mine = torch.zeros(contexts[ctx.rank].numel, device=ef.grad.device)
    codec.decode_add(mine, received, 1 / ctx.world_size, contexts[ctx.rank])
    return mine
