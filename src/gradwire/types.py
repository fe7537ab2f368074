"""The types that all modules share: messages, their layouts, and the requests of one round."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]
"""The state of a compressor, memory or exchange: tensors only, so a checkpoint needs no code."""

Parts: TypeAlias = tuple[Tensor, ...]
"""The tensors of one message, flat, in the order of its layout."""


class Field(NamedTuple):
    """One part of a message, as sender and receiver know it beforehand."""

    dtype: torch.dtype
    numel: int | None
    """Number of elements; None if only the sender knows it, so that the length travels too."""


class Layout(NamedTuple):
    """The parts of a message: their types and lengths."""

    fields: tuple[Field, ...]
    check: Callable[[Parts], None] | None = None
    """Raises WireError when received parts cannot be decoded safely."""
    max_bytes: int | None = None
    """Upper bound of the length in bytes; needed where only the sender knows the length."""


Key: TypeAlias = int | Tensor
"""A 64-bit key of random numbers: an int, or on a GPU the tensor that holds its two halves."""


class KeyStore(Protocol):
    """Keeps the RNG keys of a captured CUDA graph in GPU memory, to be renewed at every step."""

    def place(self, before: int, after: Sequence[int]) -> Tensor:
        """Returns the tensor that holds the key of `before`, the step number and `after`."""


class EncodeContext(NamedTuple):
    """Identifies a gradient: shape, rank, seed, step. All ranks know it, so it never travels."""

    shape: tuple[int, ...]
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    lane_id: int = 0
    """A hash of the parameter's name, so that parameters draw different random numbers."""
    step: int = 0
    key_store: KeyStore | None = None
    """Holds the keys where the step is captured as a CUDA graph and replayed."""
    wants_mean: bool = True
    """True if the mean is read on this rank; of simulated ranks only one needs it."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def shared_key(self) -> Key:
        """Returns the key of random numbers that are the same on all ranks."""
        return self._key()

    def own_key(self) -> Key:
        """Returns the key of random numbers that are independent between ranks."""
        return self._key(self.rank + 1)

    def shared_random(self, word: int) -> int:
        """Returns a random 64-bit number that is the same on all ranks, one per `word`."""
        assert self.key_store is None, "a captured step cannot draw numbers on the host"
        return mix(mix(self.seed, self.lane_id, self.step), word)

    def _key(self, *more: int) -> Key:
        before = mix(self.seed, self.lane_id)
        if self.key_store is not None:
            return self.key_store.place(before, more)
        return mix(self.step, *more, start=before)


def mix(*words: int, start: int = 0) -> int:
    """Hashes words to 64 bits (splitmix64's finaliser, chained)."""
    mask = (1 << 64) - 1
    h = start
    for word in words:
        h = (h + word + 0x9E3779B97F4A7C15) & mask
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
        h ^= h >> 31
    return h


class EFInput(NamedTuple):
    """The input of error feedback: `total()`, which is `grad + decay * residual`, is encoded.

    What the message does not hold is written to `residual_out`, which may be `residual` itself. It
    is None when the compression error is not needed. After encoding, `grad` may be overwritten by
    the mean.
    """

    grad: Tensor
    residual: Tensor | None = None
    residual_out: Tensor | None = None
    decay: float = 1.0

    def slice(self, start: int, stop: int) -> "EFInput":
        residual = None if self.residual is None else self.residual[start:stop]
        out = None if self.residual_out is None else self.residual_out[start:stop]
        return self._replace(grad=self.grad[start:stop], residual=residual, residual_out=out)

    def total(self) -> Tensor:
        """Returns `grad + decay * residual`, written to `residual_out` where there is one."""
        if self.residual_out is None:
            return self.grad
        if self.residual is None:
            return self.residual_out.copy_(self.grad)
        return torch.add(self.grad, self.residual, alpha=self.decay, out=self.residual_out)

    def gradient(self) -> Tensor:
        """Returns the gradient without the residual."""
        return self.grad


class CombinedInput(EFInput):
    """An input whose gradient is already part of `residual`; `grad` is zero."""

    __slots__ = ()

    def gradient(self) -> Tensor:
        assert self.residual is not None
        return self.residual


@dataclass(frozen=True)
class Payload:
    """An encoded tensor, with the context that sender and receiver share."""

    parts: Parts
    ctx: EncodeContext
    nbytes: int
    """Length of the message on the wire, padding included."""


@dataclass(frozen=True)
class IntraNode:
    """Scope of a request among the ranks of one node: `node` consecutive ranks."""

    node: int


@dataclass(frozen=True)
class InterNode:
    """Scope of a request in which every node acts as one rank: its ranks make equal requests."""

    node: int
    """Ranks per node."""
    nodes: int
    place: int
    """This rank's index in its node, which decides the share of the message that it transfers."""


Scope: TypeAlias = IntraNode | InterNode | None
"""The ranks that take part in a request; None means all. Ranks in a request are counted in it."""


@dataclass(frozen=True)
class Mean:
    """Requests the mean over all ranks of each part; the answer is one message."""

    parts: Parts
    scope: Scope = None


@dataclass(frozen=True)
class AllGather:
    """Sends the parts to all ranks; the answer is one message per rank, in `layouts[rank]`."""

    parts: Parts
    layout: Layout
    layouts: Sequence[Layout]
    scope: Scope = None


@dataclass(frozen=True)
class AllToAll:
    """Sends `messages[i]` to rank i; the answer is one message per rank, in `layouts[rank]`."""

    messages: Sequence[Parts]
    layouts: Sequence[Layout]
    rank: int
    scope: Scope = None


@dataclass(frozen=True)
class Broadcast:
    """Requests the parts of rank `root`; the parts of other ranks only give types and lengths."""

    parts: Parts
    layout: Layout
    root: int
    scope: Scope = None


Request: TypeAlias = Mean | AllGather | AllToAll | Broadcast
Answer: TypeAlias = list[Parts]
Rounds: TypeAlias = Generator[Request, Answer, Tensor]
"""The rounds of one gradient: yields requests, is sent answers, returns the mean (flat)."""
