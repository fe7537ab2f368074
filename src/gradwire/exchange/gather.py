"""Gather: every rank hears every message, and makes one gradient of them itself."""

from dataclasses import dataclass

import torch

from gradwire.base import Compressor, Exchange, OneRound, carried_by, take
from gradwire.base.aggregation import Aggregation, aggregate, check_aggregation
from gradwire.types import Gather, Given, Rounds, State, Turn


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """One round for any message: N-1 messages pass through each rank's link.

    `aggregate` is what becomes of the N answers: their mean; the majority of their signs; or for
    peers that are not to be trusted their median, trimmed mean or minimum-diameter mean.
    """

    codec: OneRound
    aggregate: Aggregation = "mean"

    def __post_init__(self) -> None:
        check_aggregation(self.aggregate)

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        return carried_by("gather", codec)

    @property
    def shows(self) -> bool:
        return self.codec.traits().shows

    def state(self, turn: Turn, device: torch.device) -> State:
        return {}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        layout = self.codec.layout(turn.numel)
        parts = take(self.codec, given, turn)
        messages = yield Gather(parts, layout, [layout] * turn.size)
        out = given.x.zero_()
        if not turn.listens:
            return out
        if self.aggregate == "mean":
            self.codec.add_to(out, messages, 1 / turn.size, turn)
        else:
            said = torch.zeros(turn.size, turn.numel, device=out.device)
            for row, message in zip(said, messages, strict=True):
                self.codec.add_to(row, [message], 1.0, turn)
            out.copy_(aggregate(said, self.aggregate))
        return out
