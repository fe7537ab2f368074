"""The decoder of a method that says all in one message, without the step around it."""

import torch
from torch import Tensor

from laconic.bench.fuzz.guard import Guarded
from laconic.bench.fuzz.target import ROOM_BYTES, Place, Target
from laconic.contract import OneRound
from laconic.types import Turn
from laconic.wire.layout import pack, unpack

NUMELS = (1009, 74)
"""No multiple of anything; a tensor, and what a shard of it may be."""


class Decoder(Target):
    """Hears messages about tensors of some sizes; `call` is the number of the size."""

    def __init__(self, codec: OneRound) -> None:
        self._codec = codec
        self._turns = [Turn((numel,), 1, 2, step=1) for numel in NUMELS]
        self._layouts = [codec.layout(numel) for numel in NUMELS]
        self._room, self._mail = Guarded(ROOM_BYTES), Guarded(ROOM_BYTES)
        dice = torch.Generator().manual_seed(0)
        self._starts = [torch.randn(numel, generator=dice) for numel in NUMELS]
        self.places = []
        for call, (turn, layout) in enumerate(zip(self._turns, self._layouts, strict=True)):
            parts = codec.compress(torch.randn(turn.numel, generator=dice), turn)
            self.places.append(Place(call, 1, pack([parts], [layout]), fixed=False))

    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        out = self._room.hold(self._starts[place.call], at_end=at_end)
        buffer = self._mail.hold(message, at_end=at_end)
        parts = unpack(buffer, [self._layouts[place.call]])
        self._codec.add_to(out, parts, 0.5, self._turns[place.call])
        return out

    def spoilt(self) -> str:
        return ""
