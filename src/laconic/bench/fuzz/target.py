"""What can be made to hear anything: a decoder alone, or a rank in the middle of a step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.spec import find_layers

ROOM_BYTES = 1 << 16

DECODE = "decode"
"""In the place of an exchange: the decoder alone."""


@dataclass(frozen=True)
class Case:
    """A method under an exchange, or its decoder alone."""

    spec: str
    exchange: str

    @property
    def ranks(self) -> int:
        """Few; two nodes where there are nodes."""
        layers = None if self.exchange == DECODE else find_layers(self.exchange)
        return 3 if layers is None else 2 * layers.node

    def __str__(self) -> str:
        return f"{self.spec} by {self.exchange}"


class Place(NamedTuple):
    """An answer of an honest step that could have been another one."""

    call: int
    rank: int
    said: Tensor
    """As it was said, in bytes."""
    fixed: bool
    """Whether the receiver itself has made the room for it, so that its length cannot change."""


class Target(ABC):
    """Hears one message after the other, and remembers none of them."""

    places: list[Place]

    @abstractmethod
    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        """What becomes of the gradient when these bytes come in that place.

        Message and gradient lie beside pages that kill who touches them, both at the same end.
        """

    @abstractmethod
    def spoilt(self) -> str:
        """What the messages so far have changed for later steps; nothing, if all is well."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether nothing has changed, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
