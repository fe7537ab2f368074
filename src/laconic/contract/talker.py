"""What holds a conversation: a compressor with rounds of its own, or one inside an exchange."""

from typing import Protocol

import torch

from laconic.types import Given, Rounds, State, Turn


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
