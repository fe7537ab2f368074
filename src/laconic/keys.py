"""Keys of random numbers that lie on a GPU, where those of the next step can take their place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.step import Lane
from laconic.types import mix

FIRST = 64
"""Room for so many keys at first; a rehearsal finds out how many there are."""


class Keys:
    """The keys of one recording, each as two words of 32 bits."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(FIRST, 2, dtype=torch.int64, device=device)
        self._made: list[tuple[Lane, int, Sequence[int]]] = []
        self._rehearsing = True

    def end_rehearsal(self) -> None:
        """From now on places are given out anew, and `renew` alone fills them."""
        self._made.clear()
        self._rehearsing = False

    def renew(self, first: int = 0) -> None:
        """Puts the keys of each lane's next step in their places."""
        if len(self._made) == first:
            return
        made = self._made[first:]
        keys = [mix(lane.turn.step, *after, start=before) for lane, before, after in made]
        words = torch.tensor([(key & 0xFFFFFFFF, key >> 32) for key in keys])
        # From pageable memory: the copy is staged before this returns, and nobody waits for it.
        self._words[first : len(self._made)].copy_(words, non_blocking=True)

    def place(self, lane: Lane, before: int, after: Sequence[int]) -> Tensor:
        if len(self._made) == len(self._words):
            assert self._rehearsing, "a recorded step draws more random numbers than its rehearsal"
            # Those who were given a place have used it already.
            self._words = torch.cat([self._words, torch.zeros_like(self._words)])
        self._made.append((lane, before, after))
        if self._rehearsing:
            self.renew(len(self._made) - 1)
        return self._words[len(self._made) - 1]


@dataclass(frozen=True)
class LaneKeys:
    """The keys of one lane's turns."""

    keys: Keys
    lane: Lane

    def place(self, before: int, after: Sequence[int]) -> Tensor:
        return self.keys.place(self.lane, before, after)
