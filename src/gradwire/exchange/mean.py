"""Mean: messages are added up on the way, by one all-reduce."""

from dataclasses import dataclass

import torch

from gradwire.base import Compressor, Exchange, OneRound, carried_by, take
from gradwire.types import Given, Mean, Rounds, State, Turn


@dataclass(frozen=True)
class MeanExchange(Exchange):
    """For summable messages: 2 (N-1)/N of a message sent by each rank, whatever N."""

    codec: OneRound

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        if not codec.traits().summable:
            return "its messages cannot be added up"
        return carried_by("mean", codec)

    @property
    def shows(self) -> bool:
        return self.codec.traits().shows

    def state(self, turn: Turn, device: torch.device) -> State:
        return {}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        parts = take(self.codec, given, turn)
        [means] = yield Mean(parts)
        if parts[0] is given.x:
            # The message was the gradient itself, and is the mean now.
            return means[0]
        out = given.x.zero_()
        self.codec.add_to(out, [means], 1.0, turn)
        return out
