"""Base classes of exchanges, which turn messages into a mean, and the `Aggregator` protocol."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from gradwire.base.compressor import Compressor, MultiRound, OneRound
from gradwire.types import EFInput, EncodeContext, Rounds, State


class Aggregator(Protocol):
    """Anything that can hold the conversation about one gradient.

    The state that `rounds` gets is a draft: it puts new tensors in the place of old ones and never
    writes into those, since a step that fails or overflows must leave no trace.
    """

    @property
    def loss_scaled_keys(self) -> tuple[str, ...]:
        """What of its state is in units of the gradient, and so follows the loss scale."""

    @property
    def sharded_keys(self) -> tuple[str, ...]:
        """What of its state is this rank's shard of a whole."""

    @property
    def ranks_per_replica(self) -> int:
        """So many consecutive ranks talk as one, and remember the same."""

    @property
    def unsent_keys(self) -> tuple[str, ...]:
        """What of its state is measured in what waits to be sent, and is rescaled along with it."""

    @property
    def graph_safe(self) -> bool:
        """Whether its part of a conversation is the same at every step."""

    @property
    def propagates_nonfinite(self) -> bool:
        """Whether its first message is not finite where any entry is not."""

    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


class Exchange(ABC):
    """A way for one-round messages to become a mean: a compressor wrapped in it is a talker.

    `Aggregator` says what its properties mean; here they are those of an exchange without a state.
    """

    examples: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Settings that tests try."""

    @property
    def loss_scaled_keys(self) -> tuple[str, ...]:
        return ()

    @property
    def sharded_keys(self) -> tuple[str, ...]:
        return ()

    @property
    def ranks_per_replica(self) -> int:
        return 1

    @property
    def unsent_keys(self) -> tuple[str, ...]:
        return ()

    @property
    def graph_safe(self) -> bool:
        return True

    @property
    def propagates_nonfinite(self) -> bool:
        return False

    @abstractmethod
    def __init__(self, codec: OneRound) -> None: ...

    @classmethod
    @abstractmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Why this exchange cannot carry the compressor's messages, or None."""

    @abstractmethod
    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


class TwoLevelExchange(Exchange):
    """An exchange of nodes with `node` ranks each, around a talker that speaks for a whole node."""

    aggregator: Aggregator
    node: int

    @abstractmethod
    def __init__(self, aggregator: Aggregator, node: int) -> None: ...

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Nothing by itself: what is said between nodes is the talker's."""
        return None

    @property
    def loss_scaled_keys(self) -> tuple[str, ...]:
        return self.aggregator.loss_scaled_keys

    @property
    def sharded_keys(self) -> tuple[str, ...]:
        return self.aggregator.sharded_keys

    @property
    def unsent_keys(self) -> tuple[str, ...]:
        return self.aggregator.unsent_keys

    @property
    def graph_safe(self) -> bool:
        return self.aggregator.graph_safe

    @property
    def ranks_per_replica(self) -> int:
        return self.node


def carried_by(name: str, codec: Compressor) -> str | None:
    """Why an exchange that carries any one-round message cannot carry this one, or None."""
    if isinstance(codec, MultiRound) and codec.rounds_like != name:
        return "it talks in rounds of its own"
    return None
