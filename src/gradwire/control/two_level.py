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
from gradwire.base import Compressor, FusedOneRound, Traits
from gradwire.compressors._sparsifier import Pipeline, Sparsifier, ThresholdSparsifier, ValueFormat
from gradwire.compressors.none import NoCompression
from gradwire.errors import ConfigError
from gradwire.spec import format_spec
from gradwire.types import EFInput, EncodeContext, Layout, Parts, mix

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

    def add(self, ef: EFInput, floor: Tensor, candidate: Tensor) -> None:
        """Adds a tensor, or one shard of it: the values that both levels would say."""
        if not self.open:
            return
        came, total = ef.gradient(), _total(ef)
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

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        first = at_factor(self.base, self.candidate if self.alone else self.floor)
        if (
            ef.grad.is_cuda
            and not self.alone
            and isinstance(first, ThresholdSparsifier)
            and first.bears_zeros
        ):
            return self.select_in_room(first, ef, ctx)
        index = first.select(ef, ctx)
        if self.alone:
            said = _total(ef)[index]
            self.gauge.add(ef, said, said)
            return index
        if self.sends == "floor" and not self.gauge.open:
            return index
        said = _total(ef)[index]
        inner = self._within(said, ctx)
        self.gauge.add(ef, said, said[inner])
        return index[inner] if self.sends == "candidate" else index

    def accumulate_only(self, ef: EFInput, ctx: EncodeContext) -> None:
        # Every rank tells what it would have said.
        self.select(ef, ctx)

    def select_in_room(self, first: ThresholdSparsifier, ef: EFInput, ctx: EncodeContext) -> Tensor:
        """The same for a card, which goes on before the host knows how many the floor says.

        What the candidate is chosen from has zeros behind it, up to the most there can be.
        """
        aim = first.aim(ctx.numel, ctx)
        count, index, said = kernels.at(ef.grad).passing_in_room(ef, aim)
        if self.sends == "floor" and not self.gauge.open:
            return index[: int(count)]
        inner = self._within(said, ctx)
        inner = inner if inner.numel() < index.numel() else inner[: int(count)]
        self.gauge.add(ef, said, said[inner])
        return index[inner] if self.sends == "candidate" else index[: int(count)]

    def _within(self, said: Tensor, ctx: EncodeContext) -> Tensor:
        """The positions of the candidate's entries among those that the floor says."""
        aim = at_factor(self.base, self.candidate).count(ctx.numel)
        if aim >= said.numel():
            return torch.arange(said.numel(), device=said.device)
        method = at_factor(self.base, said.numel() / aim)
        # Numbers of its own: those of the first level have decided what there is to choose from.
        again = ctx._replace(shape=(said.numel(),), seed=mix(ctx.seed, 2))
        return method.select(EFInput(said), again)


@dataclass(frozen=True)
class ToldLevels(Levels):
    """Levels of a sparsifier that sends positions."""

    sends_indices: ClassVar = True


@dataclass(frozen=True)
class DrawnLevels(Levels):
    """Levels of a sparsifier whose positions all ranks draw alike."""

    sends_indices: ClassVar = False


@dataclass(frozen=True)
class DenseBeside(FusedOneRound):
    """Says all there is, and measures what two levels would have said."""

    levels: Levels

    family: ClassVar = "dense"

    def traits(self) -> Traits:
        measured = self.levels.traits()
        # How many pass a threshold is asked for, though it is not how long the message is.
        return DENSE.traits()._replace(
            syncs_host=measured.variable_length or measured.syncs_host,
            step_dependent=measured.step_dependent,
        )

    def layout(self, numel: int) -> Layout:
        return DENSE.layout(numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        self.levels.select(EFInput(x), ctx)
        return (x,)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        self.levels.select(ef, ctx)
        assert ef.residual_out is not None
        said = ef.residual_out.clone()
        ef.residual_out.zero_()
        return (said,)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        DENSE.decode_add(out, messages, weight, ctx)


def levels(
    compressor: Compressor, floor: float, candidate: float, sends: Sends, alone: bool, gauge: Gauge
) -> Compressor:
    """The compressor with two levels in the place of its own factor."""
    base = sparsifier_of(compressor)
    cls = ToldLevels if base.sends_indices else DrawnLevels
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


def _total(ef: EFInput) -> Tensor:
    """All there was to say, once `select` has summed it up."""
    return ef.grad if ef.residual_out is None else ef.residual_out
