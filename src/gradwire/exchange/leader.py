"""Leader: one rank chooses the positions for all, so that values can be added up on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.base import Compressor, Exchange, OneRound, encode_with_feedback
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.types import Broadcast, EFInput, EncodeContext, Layout, Mean, Parts, Rounds, State
from gradwire.wire.indices import check_index, index_field, pack_index, unpack_index


@dataclass(frozen=True)
class LeaderExchange(Exchange):
    """For sparsifiers: the leader's positions to all, then the mean of all ranks' values there.

    Ranks lead in turn, rank `step mod N`. About three messages pass through each rank's link,
    whatever N, where a gather takes N-1; and the result has k entries, not up to N k. Values travel
    as float32, whatever the method's format, and each rank keeps what it has elsewhere. It works as
    far as ranks find the same entries large, which residuals help (CLT-k: Chen et al. 2020,
    arXiv:2104.11125; STAR-Topk: Tyagi & Swany 2023). A NaN of another rank is said when that rank
    leads, if a memory keeps it until then.
    """

    codec: OneRound

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if isinstance(codec, Pipeline):
            return "values are added up as float32, so no second method can write them"
        if not isinstance(codec, Sparsifier):
            return "it chooses no positions that a leader could tell"
        if not codec.sends_indices:
            return "all ranks know its positions already; use mean"
        if codec.traits().variable_length:
            return "only the leader would know how many positions it tells"
        return None

    @property
    def graph_safe(self) -> bool:
        """Another rank leads at each step."""
        return False

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        if not isinstance(self.codec, Sparsifier):
            return (yield from _dense(self.codec, ef, ctx))
        count = self.codec.count(ctx.numel)
        [(packed,)] = yield self._positions(ef, ctx)
        index = unpack_index(packed, ctx.numel, count)
        if ef.residual_out is None:
            values = ef.grad[index]
        else:
            values = ef.residual_out[index]
            ef.residual_out.index_fill_(0, index, 0.0)
        [(means,)] = yield Mean((values,))
        return ef.grad.zero_().index_copy_(0, index, means)

    def _positions(self, ef: EFInput, ctx: EncodeContext) -> Broadcast:
        """The leader's choice; the others only bring what they have to say together."""
        assert isinstance(self.codec, Sparsifier)
        numel, count = ctx.numel, self.codec.count(ctx.numel)
        field = index_field(numel, count)
        leader = ctx.step % ctx.world_size
        packed: Tensor
        if ctx.rank == leader:
            packed = pack_index(self.codec.select(ef, ctx), numel)
        else:
            self.codec.accumulate_only(ef, ctx)
            assert field.numel is not None
            packed = torch.zeros(field.numel, dtype=field.dtype, device=ef.grad.device)

        def check(parts: Parts) -> None:
            check_index(parts[0], numel, count)

        return Broadcast((packed,), Layout((field,), check), leader)


def _dense(codec: OneRound, ef: EFInput, ctx: EncodeContext) -> Rounds:
    """For small tensors beside a sparsifier's, which go uncompressed."""
    assert codec.traits().summable, "only dense formats go along"
    # Nothing in the first round: in the second they share the call with the chosen values.
    yield Mean(())
    parts = encode_with_feedback(codec, ef, ctx)
    [means] = yield Mean(parts)
    if parts[0] is ef.grad:
        return means[0]
    out = ef.grad.zero_()
    codec.decode_add(out, [means], 1.0, ctx)
    return out
