"""Groups parameters into messages: in DDP's buckets, in merged buckets, or as in a saved run.

DDP reorders its buckets after the first step. Floating-point sums depend on where an entry lies in
a message, so a resumed run sends its first step in the buckets of the run that was saved. Where the
fixed cost of a message dominates, small buckets are merged before they are sent.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future

from gradwire.errors import ConfigError

LEAST_BYTES = 1_000_000
"""Half of this takes 4 ms at 1 Gbit/s, and to wait for the card some more where ranks share one."""


class PendingBucket(NamedTuple):
    """A bucket that DDP waits for."""

    names: list[str]
    gradients: list[Tensor]
    buffer: Tensor
    future: "Future[Tensor]"


class Ready(NamedTuple):
    """Messages to send, and the buckets that are done when all of them are."""

    messages: list[tuple[list[str], list[Tensor]]]
    loads: list[PendingBucket]


def read_groups(saved: object, names: Collection[str]) -> list[list[str]]:
    """A grouping of parameters from a state, which may have come from anywhere."""
    groups: Sequence[object] = saved if isinstance(saved, list | tuple) else [saved]
    found = [list(group) for group in groups if isinstance(group, list | tuple)]
    known = all(isinstance(name, str) and name in names for group in found for name in group)
    if len(found) < len(groups) or not known:
        raise ConfigError(f"state: buckets must be lists of parameters, got {saved!r:.80}")
    return found


class Buckets:
    """The grouping of the last backward pass, and where it is to be repeated."""

    def __init__(self, least_bytes: int = 0) -> None:
        self._least_bytes, self._waiting_bytes = least_bytes, 0
        self._now: list[list[str]] = []
        self._last: list[list[str]] = []
        self._replay: list[list[str]] | None = None
        self._held: list[PendingBucket] = []

    def last(self) -> list[list[str]]:
        """The names in each message of the last whole backward pass."""
        return [list(names) for names in self._last]

    def replay(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups the next backward pass like this."""
        self._last = [list(names) for names in groups]
        self._replay = self.last() or None

    def add(self, load: PendingBucket, nbytes: int, is_last: bool) -> Ready | None:
        """What can go out now that this bucket is full, of which so many bytes are to be said.

        None where more are waited for.
        """
        self._held.append(load)
        self._waiting_bytes += nbytes
        enough = self._replay is None and self._waiting_bytes >= self._least_bytes
        if not (enough or is_last):
            return None
        ready = self._merged() if self._replay is None else self._replayed(self._replay)
        self._held, self._waiting_bytes = [], 0
        self._now += [names for names, _ in ready.messages]
        if is_last:
            self._last, self._now = self._now, []
        return ready

    def _merged(self) -> Ready:
        loads = self._held
        if len(loads) == 1:
            return Ready([(loads[0].names, loads[0].gradients)], loads)
        names = [name for load in loads for name in load.names]
        return Ready([(names, [grad for load in loads for grad in load.gradients])], loads)

    def _replayed(self, groups: list[list[str]]) -> Ready:
        loads, self._replay = self._held, None
        gradients = {n: g for one in loads for n, g in zip(one.names, one.gradients, strict=True)}
        if gradients.keys() != {n for group in groups for n in group}:
            groups = [one.names for one in loads]
        return Ready([(names, [gradients[n] for n in names]) for names in groups], loads)
