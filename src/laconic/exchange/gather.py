"""Gather: every rank hears every message, and takes the mean itself."""

from dataclasses import dataclass

import torch

from laconic.contract import Compressor, Exchange, OneRound, take
from laconic.types import Gather, Given, Rounds, State, Turn


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """One round for any message: N-1 messages pass through each rank's link."""

    codec: OneRound

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        return None if isinstance(codec, OneRound) else "it talks in rounds of its own"

    def state(self, turn: Turn, device: torch.device) -> State:
        return {}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        layout = self.codec.layout(turn.numel)
        parts = take(self.codec, given, turn)
        messages = yield Gather(parts, layout, [layout] * turn.size)
        out = given.x.zero_()
        self.codec.add_to(out, messages, 1 / turn.size, turn)
        return out
