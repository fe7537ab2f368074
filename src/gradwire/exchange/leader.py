"""Leader: one rank selects the indices for all, so that values can be summed in transit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.base import Compressor, Exchange, OneRound, encode_with_feedback
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.types import Broadcast, EFInput, EncodeContext, Layout, Mean, Parts, Rounds, State
from gradwire.wire.indices import check_index, index_field, pack_index, unpack_index


@dataclass(frozen=True)
class LeaderExchange(Exchange):
    """For sparsifiers: broadcasts the leader's indices, then averages all ranks' values there.

    Rank `step mod N` leads. About three messages pass through each rank's link for any N, where a
    gather takes N-1, and the result has k entries, not up to N k. Values are sent as float32 in any
    format of the method, and each rank keeps its other entries. It works as far as ranks agree on
    which entries are large, which residuals help (CLT-k: Chen et al. 2020, arXiv:2104.11125;
    STAR-Topk: Tyagi & Swany 2023). A NaN of another rank is sent when that rank leads, if a memory
    keeps it until then.
    """

    codec: OneRound

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if isinstance(codec, Pipeline):
            return "values are summed as float32, so no second method can encode them"
        if not isinstance(codec, Sparsifier):
            return "it selects no indices that a leader could send"
        if not codec.sends_indices:
            return "all ranks know its indices already; use mean"
        if codec.traits().variable_length:
            return "only the leader would know how many indices it sends"
        return None

    @property
    def graph_safe(self) -> bool:
        """False: another rank leads at each step."""
        return False

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        if not isinstance(self.codec, Sparsifier):
            return (yield from _dense(self.codec, ef, ctx))
        count = self.codec.count(ctx.numel)
        [(packed,)] = yield self._indices(ef, ctx)
        index = unpack_index(packed, ctx.numel, count)
        if ef.residual_out is None:
            values = ef.grad[index]
        else:
            values = ef.residual_out[index]
            ef.residual_out.index_fill_(0, index, 0.0)
        [(means,)] = yield Mean((values,))
        return ef.grad.zero_().index_copy_(0, index, means)

    def _indices(self, ef: EFInput, ctx: EncodeContext) -> Broadcast:
        """Returns the broadcast of the leader's selection; other ranks only add their residual."""
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
    """Averages a small tensor that is sent dense beside sparse ones."""
    assert codec.traits().summable, "only dense formats can join a leader's rounds"
    # Before the first round, in which the guard checks what is left of the input.
    parts = encode_with_feedback(codec, ef, ctx)
    # Nothing in the first round: in the second they share a collective with the sparse values.
    yield Mean(())
    [means] = yield Mean(parts)
    if parts[0] is ef.grad:
        return means[0]
    out = ef.grad.zero_()
    codec.decode_add(out, [means], 1.0, ctx)
    return out
