"""Mean: messages are summed in transit, by one all-reduce."""

from dataclasses import dataclass

import torch

from gradwire.base import Compressor, Exchange, OneRound, encode_with_feedback, refuses_own_rounds
from gradwire.types import EFInput, EncodeContext, Mean, Rounds, State


@dataclass(frozen=True)
class MeanExchange(Exchange):
    """For summable messages: 2 (N-1)/N of a message sent by each rank, whatever N."""

    codec: OneRound

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if not codec.traits().summable:
            return "its messages cannot be summed"
        return refuses_own_rounds("mean", codec)

    @property
    def propagates_nonfinite(self) -> bool:
        return self.codec.traits().propagates_nonfinite

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        return {}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        parts = encode_with_feedback(self.codec, ef, ctx)
        [means] = yield Mean(parts)
        if parts[0] is ef.grad:
            # The message was the gradient itself, which holds the mean now.
            return means[0]
        out = ef.grad.zero_()
        self.codec.decode_add(out, [means], 1.0, ctx)
        return out
