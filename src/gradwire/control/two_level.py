"""Two-level sparsification: the second level selects among the entries that the first has selected.

Exact for top-k (the top of the top), exact in distribution for random-k, approximate for threshold
methods, as at the first level. Either level or the dense gradient may be sent; the energy that both
levels keep is measured on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import Compressor, Fused, Traits
from gradwire.compressors._sparsifier import Passing, Pipeline, Sparsifier, ValueFormat
from gradwire.compressors.none import NoCompression
from gradwire.errors import ConfigError
from gradwire.spec import format_spec
from gradwire.types import Given, Layout, Parts, Turn, mix

Sends: TypeAlias = Literal["candidate", "floor", "dense"]

DENSE = NoCompression()


class Gauge:
    """What one gradient's levels hold, as sums of squares, from `start` until they are told."""

    def __init__(self, raw: bool) -> None:
        self.raw = raw
        """Compare with the gradient as it came, instead of with the residual added."""
        self.open = False
        self.squares: Tensor | None = None  # [4]: reference, floor, candidate, gradient

    def start(self) -> None:
        self.open, self.squares = True, None

    def add(self, given: Given, floor: Tensor, candidate: Tensor) -> None:
        """Adds a tensor, or one shard of it: the values that both levels would say."""
        if not self.open:
            return
        came, total = given.came(), _total(given)
        gradient = came.dot(came)
        reference = gradient if self.raw or came is total else total.dot(total)
        more = torch.stack([reference, floor.dot(floor), candidate.dot(candidate), gradient])
        self.squares = more if self.squares is None else self.squares + more


@dataclass(frozen=True)
class Levels(Sparsifier):
    """Chooses at one of two factors, and measures both."""

    base: Sparsifier
    floor: float
    candidate: float
    sends: Sends
    alone: bool
    """Only the candidate is computed, and directly."""
    gauge: Gauge
    values: ValueFormat

    family: ClassVar = "sparsification"

    def traits(self) -> Traits:
        return self.base.traits()

    def count(self, numel: int) -> int:
        factor = self.floor if self.sends == "floor" else self.candidate
        return at_factor(self.base, factor).count(numel)

    def select(self, given: Given, turn: Turn) -> Tensor:
        first = at_factor(self.base, self.candidate if self.alone else self.floor)
        if given.x.is_cuda and not self.alone and isinstance(first, Passing) and first.bears_zeros:
            return self.select_in_room(first, given, turn)
        index = first.select(given, turn)
        if self.alone:
            said = _total(given)[index]
            self.gauge.add(given, said, said)
            return index
        if self.sends == "floor" and not self.gauge.open:
            return index
        said = _total(given)[index]
        inner = self._within(said, turn)
        self.gauge.add(given, said, said[inner])
        return index[inner] if self.sends == "candidate" else index

    def overhear(self, given: Given, turn: Turn) -> None:
        # Every rank tells what it would have said.
        self.select(given, turn)

    def select_in_room(self, first: Passing, given: Given, turn: Turn) -> Tensor:
        """The same for a card, which goes on before the host knows how many the floor says.

        What the candidate is chosen from has zeros behind it, up to the most there can be.
        """
        aim = first.aim(turn.numel, turn)
        count, index, said = kernels.at(given.x).passing_in_room(given, aim)
        if self.sends == "floor" and not self.gauge.open:
            return index[: int(count)]
        inner = self._within(said, turn)
        inner = inner if inner.numel() < index.numel() else inner[: int(count)]
        self.gauge.add(given, said, said[inner])
        return index[inner] if self.sends == "candidate" else index[: int(count)]

    def _within(self, said: Tensor, turn: Turn) -> Tensor:
        """The positions of the candidate's entries among those that the floor says."""
        aim = at_factor(self.base, self.candidate).count(turn.numel)
        if aim >= said.numel():
            return torch.arange(said.numel(), device=said.device)
        method = at_factor(self.base, said.numel() / aim)
        # Numbers of its own: those of the first level have decided what there is to choose from.
        again = turn._replace(shape=(said.numel(),), seed=mix(turn.seed, 2))
        return method.select(Given(said), again)


@dataclass(frozen=True)
class ToldLevels(Levels):
    """Levels of a sparsifier that sends positions."""

    told: ClassVar = True


@dataclass(frozen=True)
class DrawnLevels(Levels):
    """Levels of a sparsifier whose positions all ranks draw alike."""

    told: ClassVar = False


@dataclass(frozen=True)
class DenseBeside(Fused):
    """Says all there is, and measures what two levels would have said."""

    levels: Levels

    family: ClassVar = "dense"

    def traits(self) -> Traits:
        measured = self.levels.traits()
        # How many pass a threshold is asked for, though it is not how long the message is.
        return DENSE.traits()._replace(
            waits=measured.varies or measured.waits, by_step=measured.by_step
        )

    def layout(self, numel: int) -> Layout:
        return DENSE.layout(numel)

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        self.levels.select(Given(x), turn)
        return (x,)

    def take(self, given: Given, turn: Turn) -> Parts:
        self.levels.select(given, turn)
        assert given.left is not None
        said = given.left.clone()
        given.left.zero_()
        return (said,)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        DENSE.add_to(out, messages, weight, turn)


def levels(
    compressor: Compressor, floor: float, candidate: float, sends: Sends, alone: bool, gauge: Gauge
) -> Compressor:
    """The compressor with two levels in the place of its own factor."""
    base = sparsifier_of(compressor)
    cls = ToldLevels if base.told else DrawnLevels
    made = cls(base, floor, candidate, sends, alone, gauge, base.values)
    if sends == "dense":
        return DenseBeside(made)
    if isinstance(compressor, Pipeline):
        return replace(compressor, sparsifier=made)
    return made


def sparsifier_of(compressor: Compressor) -> Sparsifier:
    """The part of a compressor that chooses."""
    chooser = _chooser(compressor)
    assert isinstance(chooser, Sparsifier)
    return chooser


def check_factor(who: str, compressor: Compressor) -> None:
    """Raises ConfigError unless the compressor has a part that chooses as many as it is told."""
    chooser = _chooser(compressor)
    if not isinstance(chooser, Sparsifier) or "ratio" not in {f.name for f in fields(chooser)}:  # type: ignore[arg-type]
        raise ConfigError(
            f"{who}: {format_spec(compressor)} has no factor; use a sparsifier with a ratio"
        )


def _chooser(compressor: Compressor) -> Compressor:
    return compressor.sparsifier if isinstance(compressor, Pipeline) else compressor


def at_factor(base: Sparsifier, factor: float) -> Sparsifier:
    """The same sparsifier, keeping one of `factor` entries."""
    return replace(base, ratio=1 / factor)  # type: ignore[type-var]


def _total(given: Given) -> Tensor:
    """All there was to say, once `select` has summed it up."""
    return given.x if given.left is None else given.left
