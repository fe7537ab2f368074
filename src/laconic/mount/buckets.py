"""Which parameters share a message: as DDP hands them over, or once more as they did before.

DDP orders its buckets anew after the first step. Sums of floats depend on where in a message an
entry lies, so a resumed run sends its first step in the buckets of the run that was saved.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future


class Load(NamedTuple):
    """A bucket that DDP waits for."""

    names: list[str]
    gradients: list[Tensor]
    buffer: Tensor
    future: "Future[Tensor]"


class Ready(NamedTuple):
    """Messages to send, and the buckets that are done when all of them are."""

    messages: list[tuple[list[str], list[Tensor]]]
    loads: list[Load]


class Buckets:
    """The grouping of the last backward pass, and where it is to be repeated."""

    def __init__(self) -> None:
        self._now: list[list[str]] = []
        self._last: list[list[str]] = []
        self._replay: list[list[str]] | None = None
        self._held: list[Load] = []

    def last(self) -> list[list[str]]:
        """The names in each message of the last whole backward pass."""
        return [list(names) for names in self._last]

    def replay(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups the next backward pass like this."""
        self._last = [list(names) for names in groups]
        self._replay = self.last() or None

    def add(self, load: Load, is_last: bool) -> Ready | None:
        """What can go out now that this bucket is full; None where more are waited for."""
        if self._replay is None:
            ready = Ready([(load.names, load.gradients)], [load])
        else:
            self._held.append(load)
            if not is_last:
                return None
            ready = self._replayed(self._replay)
        self._now += [names for names, _ in ready.messages]
        if is_last:
            self._last, self._now = self._now, []
        return ready

    def _replayed(self, groups: list[list[str]]) -> Ready:
        loads, self._held, self._replay = self._held, [], None
        gradients = {n: g for one in loads for n, g in zip(one.names, one.gradients, strict=True)}
        if gradients.keys() != {n for group in groups for n in group}:
            groups = [one.names for one in loads]
        return Ready([(names, [gradients[n] for n in names]) for names in groups], loads)
