"""Base classes of exchanges, which turn messages into a mean, and the `Aggregator` protocol."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from gradwire.base.compressor import Compressor, MultiRound, OneRound
from gradwire.types import EFInput, EncodeContext, Rounds, State


class Aggregator(Protocol):
    """Turns the gradients of all ranks into their mean: a `MultiRound` compressor or an exchange.

    The state that `rounds` gets is pending: it replaces tensors and never writes into the old ones,
    so that a step that fails or overflows can be discarded. Before its first request it writes
    `residual_out`, and before any request it replaces the state that is known by then, since the
    non-finite guard checks both and its flag travels with the request.
    """

    @property
    def loss_scaled_keys(self) -> tuple[str, ...]:
        """Keys of the state in units of the gradient, which follow the loss scale."""

    @property
    def sharded_keys(self) -> tuple[str, ...]:
        """Keys of the state that hold this rank's shard of a whole."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of consecutive ranks that act as one and have equal state."""

    @property
    def unsent_keys(self) -> tuple[str, ...]:
        """Keys of the state that hold what waits to be sent, and are rescaled with it."""

    @property
    def graph_safe(self) -> bool:
        """True if its work is the same at every step, so that a CUDA graph can replay it."""

    @property
    def propagates_nonfinite(self) -> bool:
        """True if a non-finite input always yields a non-finite value in the first message."""

    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


class Exchange(ABC):
    """Turns one-round messages into a mean: a compressor wrapped in it is an `Aggregator`.

    The properties here are those of an exchange without state; `Aggregator` documents them.
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
        """Returns why this exchange cannot transfer the compressor's messages, or None."""

    @abstractmethod
    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


class TwoLevelExchange(Exchange):
    """An exchange among nodes of `node` ranks, around an aggregator that acts for a whole node."""

    aggregator: Aggregator
    node: int

    @abstractmethod
    def __init__(self, aggregator: Aggregator, node: int) -> None: ...

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Returns None: the exchange between nodes decides."""
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


def refuses_own_rounds(exchange: str, codec: Compressor) -> str | None:
    """Returns why an exchange of one-round messages cannot transfer a `MultiRound`, or None."""
    if isinstance(codec, MultiRound) and codec.rounds_like != exchange:
        return "it defines its own rounds"
    return None
