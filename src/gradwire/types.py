"""The nouns that all files share: parts, payloads, what goes on the wire, and what comes back."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]
"""What a compressor, a memory or an exchange remembers: tensors only, so a checkpoint is free."""

Parts: TypeAlias = tuple[Tensor, ...]
"""The tensors of one message, flat, in the order of its layout."""


class Field(NamedTuple):
    """One part of a message as both sides know it beforehand."""

    dtype: torch.dtype
    numel: int | None
    """Number of elements; None when only the sender knows, so that the length travels too."""


class Layout(NamedTuple):
    """The form of a message."""

    fields: tuple[Field, ...]
    check: Callable[[Parts], None] | None = None
    """Raises WireError when received parts cannot be decoded safely."""
    most_bytes: int | None = None
    """No message is longer; needed where a length is the sender's secret."""


Key: TypeAlias = int | Tensor
"""64 bits that random numbers are a function of: themselves, or where on a GPU their halves lie."""


class KeyPlaces(Protocol):
    """Keeps keys on a GPU, where those of the next step can take their place."""

    def place(self, before: int, after: Sequence[int]) -> Tensor:
        """Where the key lies that all words make: `before` the step's number and `after` it."""


class Turn(NamedTuple):
    """Which gradient is exchanged, where and when: known to every rank, so it never travels."""

    shape: tuple[int, ...]
    rank: int = 0
    size: int = 1
    seed: int = 0
    lane: int = 0
    step: int = 0
    keys: KeyPlaces | None = None
    """Who keeps the keys, where the work on a gradient is recorded and done again with others."""
    listens: bool = True
    """Whether anybody reads the mean: of simulated ranks, which would have the same, one does."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def shared_key(self) -> Key:
        """Key of random numbers that are the same on all ranks."""
        return self._key()

    def own_key(self) -> Key:
        """Key of random numbers that are independent between ranks."""
        return self._key(self.rank + 1)

    def number(self, word: int) -> int:
        """A random number of 64 bits that is the same on all ranks, one for each word."""
        assert self.keys is None, "a recorded step has no numbers of its own"
        return mix(mix(self.seed, self.lane, self.step), word)

    def _key(self, *more: int) -> Key:
        before = mix(self.seed, self.lane)
        if self.keys is not None:
            return self.keys.place(before, more)
        return mix(self.step, *more, start=before)


def mix(*words: int, start: int = 0) -> int:
    """64 bits in which every bit of every word counts (splitmix64's finaliser, chained)."""
    mask = (1 << 64) - 1
    h = start
    for word in words:
        h = (h + word + 0x9E3779B97F4A7C15) & mask
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
        h ^= h >> 31
    return h


class Given(NamedTuple):
    """What a lane has to say: `x + decay * residual`; `left` receives what remains unsaid.

    `left` may be `residual` itself. It is None when nobody asks for what was lost.
    """

    x: Tensor
    residual: Tensor | None = None
    left: Tensor | None = None
    decay: float = 1.0

    def slice(self, start: int, stop: int) -> "Given":
        residual = None if self.residual is None else self.residual[start:stop]
        left = None if self.left is None else self.left[start:stop]
        return self._replace(x=self.x[start:stop], residual=residual, left=left)

    def total(self) -> Tensor:
        """What has to be said as one tensor: inside `left` where there is one."""
        if self.left is None:
            return self.x
        if self.residual is None:
            return self.left.copy_(self.x)
        return torch.add(self.x, self.residual, alpha=self.decay, out=self.left)

    def came(self) -> Tensor:
        """The gradient as it came."""
        return self.x


class Mixed(Given):
    """The same where x is nothing: a gradient is a part of the residual, and not known alone."""

    __slots__ = ()

    def came(self) -> Tensor:
        assert self.residual is not None
        return self.residual


@dataclass(frozen=True)
class Payload:
    """An encoded tensor, and what both sides know of it without being told."""

    parts: Parts
    turn: Turn
    nbytes: int
    """Length of the message on the wire, padding included."""


@dataclass(frozen=True)
class Inside:
    """Only the ranks of one node take part: `node` consecutive ones."""

    node: int


@dataclass(frozen=True)
class Between:
    """Nodes take part as if each were one rank: all ranks of a node ask for the same."""

    node: int
    """Ranks a node."""
    nodes: int
    place: int
    """This rank's place in its node: which share of the node's messages it carries."""


Scope: TypeAlias = Inside | Between | None
"""Who takes part in a request; None means all ranks. "Rank" in a request is as its scope counts."""


@dataclass(frozen=True)
class Mean:
    """Asks for the mean over all ranks of each part; answered by one message."""

    parts: Parts
    scope: Scope = None


@dataclass(frozen=True)
class Gather:
    """Tells all ranks the parts; answered by one message a rank, laid out as `layouts[rank]`."""

    parts: Parts
    layout: Layout
    layouts: Sequence[Layout]
    scope: Scope = None


@dataclass(frozen=True)
class Scatter:
    """Tells rank i the parts `messages[i]`; answered by one message a rank, laid out as mine."""

    messages: Sequence[Parts]
    layouts: Sequence[Layout]
    rank: int
    scope: Scope = None


@dataclass(frozen=True)
class Broadcast:
    """Asks for rank `root`'s parts; answered by one message. Other ranks' only give the form."""

    parts: Parts
    layout: Layout
    root: int
    scope: Scope = None


Request: TypeAlias = Mean | Gather | Scatter | Broadcast
Answer: TypeAlias = list[Parts]
Rounds: TypeAlias = Generator[Request, Answer, Tensor]
"""A conversation: yields requests, is sent answers, returns the mean over all ranks (flat)."""
