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

SentLevel: TypeAlias = Literal["candidate", "floor", "dense"]

DENSE = NoCompression()


class GainMeter:
    """Collects the energy of one gradient's two levels, as sums of squares, once `start` is called.

    `recording` ends when the sums have been read.
    """

    def __init__(self, raw: bool) -> None:
        self.raw = raw
        """Compare with the gradient alone instead of gradient plus residual."""
        self.recording = False
        self.squares: Tensor | None = None  # [4]: reference, floor, candidate, gradient

    def start(self) -> None:
        self.recording, self.squares = True, None

    def add(self, ef: EFInput, floor: Tensor, candidate: Tensor) -> None:
        """Adds the values that both levels select in a tensor, or in one shard of it."""
        if not self.recording:
            return
        grad, total = ef.gradient(), _total(ef)
        gradient = grad.dot(grad)
        reference = gradient if self.raw or grad is total else total.dot(total)
        squares = torch.stack([reference, floor.dot(floor), candidate.dot(candidate), gradient])
        self.squares = squares if self.squares is None else self.squares + squares


@dataclass(frozen=True)
class TwoLevelSparsifier(Sparsifier):
    """Selects entries at one of two compression factors, and measures the energy of both."""

    base: Sparsifier
    floor: float
    candidate: float
    sends: SentLevel
    candidate_only: bool
    """Computes only the candidate, from the whole gradient."""
    gain_meter: GainMeter
    values: ValueFormat

    family: ClassVar = "sparsification"

    def traits(self) -> Traits:
        return self.base.traits()

    def count(self, numel: int) -> int:
        factor = self.floor if self.sends == "floor" else self.candidate
        return with_factor(self.base, factor).count(numel)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        first = with_factor(self.base, self.candidate if self.candidate_only else self.floor)
        if (
            ef.grad.is_cuda
            and not self.candidate_only
            and isinstance(first, ThresholdSparsifier)
            and first.tolerates_zero_padding
        ):
            return self.select_padded(first, ef, ctx)
        index = first.select(ef, ctx)
        if self.candidate_only:
            values = _total(ef)[index]
            self.gain_meter.add(ef, values, values)
            return index
        if self.sends == "floor" and not self.gain_meter.recording:
            return index
        values = _total(ef)[index]
        inner = self._select_candidate(values, ctx)
        self.gain_meter.add(ef, values, values[inner])
        return index[inner] if self.sends == "candidate" else index

    def accumulate_only(self, ef: EFInput, ctx: EncodeContext) -> None:
        # Every rank reports the energy it would have sent.
        self.select(ef, ctx)

    def select_padded(self, first: ThresholdSparsifier, ef: EFInput, ctx: EncodeContext) -> Tensor:
        """Selects like `select`, on a GPU, before the host knows how many entries the floor has.

        The values that the candidate is selected from are padded with zeros to the maximal length.
        """
        threshold = first.threshold_spec(ctx.numel, ctx)
        count, index, values = kernels.on(ef.grad.device).select_by_threshold_padded(ef, threshold)
        if self.sends == "floor" and not self.gain_meter.recording:
            return index[: int(count)]
        inner = self._select_candidate(values, ctx)
        inner = inner if inner.numel() < index.numel() else inner[: int(count)]
        self.gain_meter.add(ef, values, values[inner])
        return index[inner] if self.sends == "candidate" else index[: int(count)]

    def _select_candidate(self, values: Tensor, ctx: EncodeContext) -> Tensor:
        """Returns the positions of the candidate's entries among the floor's `values`."""
        target = with_factor(self.base, self.candidate).count(ctx.numel)
        if target >= values.numel():
            return torch.arange(values.numel(), device=values.device)
        method = with_factor(self.base, values.numel() / target)
        # Different random numbers: those of the first level have already selected these entries.
        inner_ctx = ctx._replace(shape=(values.numel(),), seed=mix(ctx.seed, 2))
        return method.select(EFInput(values), inner_ctx)


@dataclass(frozen=True)
class IndexedTwoLevel(TwoLevelSparsifier):
    """Two levels of a sparsifier that sends indices."""

    sends_indices: ClassVar = True


@dataclass(frozen=True)
class SharedIndexTwoLevel(TwoLevelSparsifier):
    """Two levels of a sparsifier whose indices all ranks draw from the same random numbers."""

    sends_indices: ClassVar = False


@dataclass(frozen=True)
class MeasuredDense(FusedOneRound):
    """Sends the dense gradient, and measures the energy of the two levels."""

    measured: TwoLevelSparsifier

    family: ClassVar = "dense"

    def traits(self) -> Traits:
        measured = self.measured.traits()
        # The length of a level is read on the host, though the dense message does not depend on it.
        return DENSE.traits()._replace(
            syncs_host=measured.variable_length or measured.syncs_host,
            step_dependent=measured.step_dependent,
        )

    def layout(self, numel: int) -> Layout:
        return DENSE.layout(numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        self.measured.select(EFInput(x), ctx)
        return (x,)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        self.measured.select(ef, ctx)
        assert ef.residual_out is not None
        sent = ef.residual_out.clone()
        ef.residual_out.zero_()
        return (sent,)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        DENSE.decode_add(out, messages, weight, ctx)


def two_level(
    compressor: Compressor,
    floor: float,
    candidate: float,
    sends: SentLevel,
    candidate_only: bool,
    gain_meter: GainMeter,
) -> Compressor:
    """Returns the compressor with two levels in place of its own compression factor."""
    base = sparsifier_of(compressor)
    cls = IndexedTwoLevel if base.sends_indices else SharedIndexTwoLevel
    levels = cls(base, floor, candidate, sends, candidate_only, gain_meter, base.values)
    if sends == "dense":
        return MeasuredDense(levels)
    if isinstance(compressor, Pipeline):
        return replace(compressor, sparsifier=levels)
    return levels


def sparsifier_of(compressor: Compressor) -> Sparsifier:
    """Returns the compressor itself or, of a pipeline, its sparsifier."""
    sparsifier = _first_stage(compressor)
    assert isinstance(sparsifier, Sparsifier)
    return sparsifier


def check_has_ratio(where: str, compressor: Compressor) -> None:
    """Raises ConfigError unless the compressor is or contains a sparsifier with a ratio."""
    stage = _first_stage(compressor)
    if not isinstance(stage, Sparsifier) or "ratio" not in {f.name for f in fields(stage)}:  # type: ignore[arg-type]
        raise ConfigError(
            f"{where}: {format_spec(compressor)} has no factor; use a sparsifier with a ratio"
        )


def _first_stage(compressor: Compressor) -> Compressor:
    return compressor.sparsifier if isinstance(compressor, Pipeline) else compressor


def with_factor(base: Sparsifier, factor: float) -> Sparsifier:
    """Returns the sparsifier with a ratio of 1 / `factor`."""
    return replace(base, ratio=1 / factor)  # type: ignore[type-var]


def _total(ef: EFInput) -> Tensor:
    """Returns gradient plus residual, which `select` has written to `residual_out`."""
    return ef.grad if ef.residual_out is None else ef.residual_out
