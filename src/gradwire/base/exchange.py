"""Base classes of exchanges, which turn messages into a mean, and the `Aggregator` protocol."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from gradwire.base.compressor import Compressor, ManyRounds, OneRound
from gradwire.types import Given, Rounds, State, Turn


class Talker(Protocol):
    """Anything that can hold the conversation about one gradient.

    The state that `rounds` gets is a draft: it puts new tensors in the place of old ones and never
    writes into those, since a step that fails or overflows must leave no trace.
    """

    @property
    def units(self) -> tuple[str, ...]:
        """What of its state is in units of the gradient, and so follows the loss scale."""

    @property
    def shards(self) -> tuple[str, ...]:
        """What of its state is this rank's shard of a whole."""

    @property
    def unison(self) -> int:
        """So many consecutive ranks talk as one, and remember the same."""

    @property
    def owed(self) -> tuple[str, ...]:
        """What of its state is measured in what waits to be sent, and is rescaled along with it."""

    @property
    def steady(self) -> bool:
        """Whether its part of a conversation is the same at every step."""

    @property
    def shows(self) -> bool:
        """Whether its first message is not finite where any entry is not."""

    def state(self, turn: Turn, device: torch.device) -> State: ...

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


class Exchange(ABC):
    """A way for one-round messages to become a mean: a compressor wrapped in it is a talker.

    `Talker` says what its properties mean; here they are those of an exchange without a state.
    """

    examples: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Settings that tests try."""

    @property
    def units(self) -> tuple[str, ...]:
        return ()

    @property
    def shards(self) -> tuple[str, ...]:
        return ()

    @property
    def unison(self) -> int:
        return 1

    @property
    def owed(self) -> tuple[str, ...]:
        return ()

    @property
    def steady(self) -> bool:
        return True

    @property
    def shows(self) -> bool:
        return False

    @abstractmethod
    def __init__(self, codec: OneRound) -> None: ...

    @classmethod
    @abstractmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Why this exchange cannot carry the compressor's messages, or None."""

    @abstractmethod
    def state(self, turn: Turn, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


class Layered(Exchange):
    """An exchange of nodes with `node` ranks each, around a talker that speaks for a whole node."""

    talker: Talker
    node: int

    @abstractmethod
    def __init__(self, talker: Talker, node: int) -> None: ...

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Nothing by itself: what is said between nodes is the talker's."""
        return None

    @property
    def units(self) -> tuple[str, ...]:
        return self.talker.units

    @property
    def shards(self) -> tuple[str, ...]:
        return self.talker.shards

    @property
    def owed(self) -> tuple[str, ...]:
        return self.talker.owed

    @property
    def steady(self) -> bool:
        return self.talker.steady

    @property
    def unison(self) -> int:
        return self.node


def carried_by(name: str, codec: Compressor) -> str | None:
    """Why an exchange that carries any one-round message cannot carry this one, or None."""
    if isinstance(codec, ManyRounds) and codec.how != name:
        return "it talks in rounds of its own"
    return None
