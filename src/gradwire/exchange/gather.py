"""Gather: every rank receives every message, and aggregates them itself."""

from dataclasses import dataclass

import torch

from gradwire.base import Compressor, Exchange, OneRound, encode_with_feedback, refuses_own_rounds
from gradwire.base.aggregation import UNKNOWN, Aggregation, aggregate, check_aggregation
from gradwire.types import AllGather, EFInput, EncodeContext, Rounds, State


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """One round for any message: N-1 messages pass through each rank's link.

    `aggregate` combines the N messages: their mean; the majority of their signs; or, if ranks may
    be faulty, one of the robust aggregations: their median, trimmed mean, minimum-diameter mean,
    Krum, Multi-Krum, geometric median or clipped mean. "median_norm" is the mean after
    messages above the median norm were scaled down to it; "coincident" divides the sum of an entry
    by the number of ranks that sent it instead of N.

    A robust aggregation assumes `faulty` faulty ranks; -1 stands for as many as a median
    tolerates, or a quarter of all. With `mix` every message is first replaced by the mean of the
    N - `faulty` nearest to it.
    """

    codec: OneRound
    aggregate: Aggregation = "mean"
    faulty: int = UNKNOWN
    mix: bool = False

    def __post_init__(self) -> None:
        check_aggregation(self.aggregate, self.faulty, self.mix)

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        return refuses_own_rounds("gather", codec)

    @property
    def propagates_nonfinite(self) -> bool:
        return self.codec.traits().propagates_nonfinite

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        layout = self.codec.layout(ef.grad.numel())
        parts = encode_with_feedback(self.codec, ef, ctx)
        messages = yield AllGather(parts, layout, [layout] * ctx.world_size)
        out = ef.grad.zero_()
        if not ctx.wants_mean:
            return out
        if self.aggregate == "mean":
            self.codec.decode_add(out, messages, 1 / ctx.world_size, ctx)
        else:
            decoded = torch.zeros(ctx.world_size, ctx.numel, device=out.device)
            for row, message in zip(decoded, messages, strict=True):
                self.codec.decode_add(row, [message], 1.0, ctx)
            out.copy_(aggregate(decoded, self.aggregate, self.faulty, self.mix))
        return out
