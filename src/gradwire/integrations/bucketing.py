"""Bucketing: which parameters share a message.

DDP reorders its buckets after the first step. Sums of floats depend on the position in a message,
so a resumed run sends its first step in the buckets of the run that was saved. Where a message
costs more than its bytes, short buckets are merged with the next.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future

from gradwire.errors import ConfigError

STAGED_BYTES = 250_000
"""A gather of this among four ranks takes 6 ms at 1 Gbit/s, as long as a wait for a shared GPU."""

STAGED_ROUNDS_BYTES = 1_000_000
"""The same for methods of several rounds, each of which waits for the GPU."""

ROUNDS_BYTES = 64_000
"""This takes half a millisecond at 1 Gbit/s, as much as the rounds of another message."""


def default_least_bytes(*, is_direct: bool, has_rounds: bool) -> int:
    """Returns the length below which a bucket's message is sent with the next one.

    Messages of a GPU that are staged through the host wait for it, and methods of several rounds
    wait for all ranks in each of them.
    """
    if not is_direct:
        return STAGED_ROUNDS_BYTES if has_rounds else STAGED_BYTES
    return ROUNDS_BYTES if has_rounds else 0


class PendingBucket(NamedTuple):
    """A bucket whose future DDP waits for."""

    names: list[str]
    gradients: list[Tensor]
    buffer: Tensor
    future: "Future[Tensor]"


class Ready(NamedTuple):
    """Messages to send, and the buckets that are complete when all of them are exchanged."""

    messages: list[tuple[list[str], list[Tensor]]]
    buckets: list[PendingBucket]


def read_groups(saved: object, names: Collection[str]) -> list[list[str]]:
    """Reads a grouping of parameters from a state; raises ConfigError if it is none."""
    groups: Sequence[object] = saved if isinstance(saved, list | tuple) else [saved]
    found = [list(group) for group in groups if isinstance(group, list | tuple)]
    known = all(isinstance(name, str) and name in names for group in found for name in group)
    if len(found) < len(groups) or not known:
        raise ConfigError(f"state: buckets must be lists of parameters, got {saved!r:.80}")
    return found


class Buckets:
    """Merges short buckets; records the grouping of the last backward pass, and can replay it."""

    def __init__(self, least_bytes: int = 0) -> None:
        self.least_bytes, self._held_bytes = least_bytes, 0
        self._current: list[list[str]] = []
        self._last: list[list[str]] = []
        self._replay: list[list[str]] | None = None
        self._held: list[PendingBucket] = []

    def last(self) -> list[list[str]]:
        """Returns the names in each message of the last complete backward pass."""
        return [list(names) for names in self._last]

    def replay(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups the next backward pass like this."""
        self._last = [list(names) for names in groups]
        self._replay = self.last() or None

    def record(self, groups: Sequence[Sequence[str]]) -> None:
        """Records the grouping of a backward pass that was exchanged elsewhere."""
        self._last = [list(names) for names in groups]

    def add(self, bucket: PendingBucket, nbytes: int, is_last: bool) -> Ready | None:
        """Adds a bucket with a message of `nbytes`; returns what to send now, if anything."""
        self._held.append(bucket)
        self._held_bytes += nbytes
        enough = self._replay is None and self._held_bytes >= self.least_bytes
        if not (enough or is_last):
            return None
        ready = self._merged() if self._replay is None else self._replayed(self._replay)
        self._held, self._held_bytes = [], 0
        self._current += [names for names, _ in ready.messages]
        if is_last:
            self._last, self._current = self._current, []
        return ready

    def abandon(self) -> None:
        """Forgets the buckets of a backward pass that was interrupted."""
        self._held, self._held_bytes, self._current = [], 0, []

    def _merged(self) -> Ready:
        held = self._held
        if len(held) == 1:
            return Ready([(held[0].names, held[0].gradients)], held)
        names = [name for bucket in held for name in bucket.names]
        return Ready([(names, [grad for bucket in held for grad in bucket.gradients])], held)

    def _replayed(self, groups: list[list[str]]) -> Ready:
        held, self._replay = self._held, None
        gradients = {n: g for b in held for n, g in zip(b.names, b.gradients, strict=True)}
        if gradients.keys() != {n for group in groups for n in group}:
            groups = [bucket.names for bucket in held]
        return Ready([(names, [gradients[n] for n in names]) for names in groups], held)
