"""Sparsifiers: messages that hold a selection of entries, as indices and values.

`Sparsifier` is the base class of methods that select; `Pipeline` lets another method encode the
selected values.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound, OneRound, Traits
from gradwire.compressors._cast import Cast
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.errors import ConfigError, WireError
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.indices import add_packed, check_index, index_bytes, index_field, pack_index
from gradwire.wire.layout import max_bytes, packed_bytes


def counted_layout(codec: OneRound, numel: int, count: int) -> Layout:
    """Of a message about `count` entries of `numel`: their positions, then their values."""
    inner = codec.layout(count)

    def check(parts: Parts) -> None:
        check_index(parts[0], numel, count)
        if inner.check is not None:
            inner.check(parts[1:])

    return Layout((index_field(numel, count), *inner.fields), check, max_bytes(numel))


def varying_layout(codec: OneRound, numel: int) -> Layout:
    """The number of entries first; all lengths follow from it, and are checked against it."""

    def check(parts: Parts) -> None:
        count = int(parts[0])
        if not 0 <= count <= numel:
            raise WireError(f"message tells {count} entries of a tensor of {numel}")
        inner = codec.layout(count)
        fields = (index_field(numel, count), *inner.fields)
        for part, field in zip(parts[1:], fields, strict=True):
            if field.numel is not None and part.numel() != field.numel:
                raise WireError(
                    f"message has a part of {part.numel()} where {count} entries take {field.numel}"
                )
        check_index(parts[1], numel, count)
        if inner.check is not None:
            inner.check(parts[2:])

    secret = [Field(field.dtype, None) for field in codec.layout(0).fields]
    fields = (Field(torch.int32, 1), Field(torch.uint8, None), *secret)
    return Layout(fields, check, max_bytes(numel))


def said_of(
    codec: OneRound, messages: Sequence[Parts], count: int, weight: float, ctx: EncodeContext
) -> tuple[Tensor, float]:
    """What each message says of its `count` entries, and the weight that they still have to get."""
    if isinstance(codec, Cast):
        return torch.stack([parts[0] for parts in messages]), weight
    rows = torch.zeros(len(messages), count, device=messages[0][0].device)
    for row, parts in zip(rows, messages, strict=True):
        codec.decode_add(row, [parts], weight, ctx._replace(shape=(count,)))
    return rows, 1.0


def each_said(
    codec: OneRound, messages: Sequence[tuple[Tensor, Parts]], weight: float, ctx: EncodeContext
) -> list[Tensor]:
    """The same for messages of their own lengths, each with its count."""
    if isinstance(codec, Cast):
        return [values for _, (values,) in messages]
    # Asked all at once, so that the host waits once.
    counts = torch.cat([count for count, _ in messages]).tolist()
    rows = [
        said_of(codec, [parts], count, weight, ctx)[0]
        for count, (_, parts) in zip(counts, messages, strict=True)
    ]
    return [row.view(-1) for row in rows]


ValueFormat: TypeAlias = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, Cast] = {"fp32": NoCompression(), "bf16": Bf16(), "fp16": Fp16()}


class Sparsifier(FusedOneRound):
    """A method that chooses entries; how they are told is the same for all."""

    values: ValueFormat
    sends_indices: ClassVar[bool]
    """Whether positions travel. Where not, `select` looks at the size of `x` alone, not at `x`."""

    @abstractmethod
    def count(self, numel: int) -> int:
        """How many entries of `numel` are chosen; about how many where `traits().variable_length`."""

    @abstractmethod
    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        """The positions of the chosen entries of `ef.total()`: int64, ascending, distinct.

        Calls `ef.total()`, or does the same in a kernel.
        """

    def accumulate_only(self, ef: EFInput, ctx: EncodeContext) -> None:
        """Another rank chooses for this one: only calls `ef.total()`."""
        ef.total()

    def layout(self, numel: int) -> Layout:
        return _layout(self, FORMATS[self.values], numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return _take(self, FORMATS[self.values], EFInput(x), ctx)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        return _take(self, FORMATS[self.values], ef, ctx)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        _add_to(self, FORMATS[self.values], out, messages, weight, ctx)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self, FORMATS[self.values], shape)


class ThresholdSparsifier(Sparsifier):
    """A sparsifier that lets pass what reaches a threshold, however many entries that are."""

    bears_zeros: ClassVar[bool] = False
    """Whether entries are chosen by the same rule where zeros stand beside them."""

    @abstractmethod
    def aim(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        """How the threshold for `numel` entries is found, and the most that may pass."""

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        return kernels.at(ef.grad).passing(ef, self.aim(ef.grad.numel(), ctx))

    def draft(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        """The message in room for the longest one: the host is not told yet how long it is.

        On a GPU nothing waits, so that a CUDA graph can hold it; `trimmed` then asks.
        """
        return _draft(self, FORMATS[self.values], ef, ctx)


def trimmed(draft: Parts, numel: int) -> Parts:
    """The message of a draft: here the host waits for its length."""
    count = int(draft[0])
    return draft[0], draft[1][: index_bytes(numel, count)], draft[2][:count]


@dataclass(frozen=True)
class Pipeline(FusedOneRound):
    """A sparsifier whose chosen values are written by another method: `topk | qsgd`."""

    sparsifier: Sparsifier
    quantiser: OneRound

    examples: ClassVar = ()
    family: ClassVar = "hybrid"
    paper: ClassVar = "Basu et al. 2019, arXiv:1906.02367"

    def traits(self) -> Traits:
        first, second = self.sparsifier.traits(), self.quantiser.traits()
        return Traits(
            summable=first.summable and second.summable,
            rounds_sums=second.rounds_sums,
            unbiased=first.unbiased and second.unbiased,
            # The error of the second acts on what the first has kept, and adds to what it lost.
            contraction=first.contraction and second.contraction,
            variable_length=first.variable_length or second.variable_length,
            syncs_host=first.syncs_host or second.syncs_host,
            step_dependent=first.step_dependent or second.step_dependent,
            is_vote=second.is_vote,
            # What is not finite is among the chosen, and the second shows it of them.
            propagates_nonfinite=first.propagates_nonfinite and second.propagates_nonfinite,
            why_not=first.why_not or second.why_not,
        )

    def layout(self, numel: int) -> Layout:
        return _layout(self.sparsifier, self.quantiser, numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return _take(self.sparsifier, self.quantiser, EFInput(x), ctx)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        return _take(self.sparsifier, self.quantiser, ef, ctx)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        _add_to(self.sparsifier, self.quantiser, out, messages, weight, ctx)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self.sparsifier, self.quantiser, shape)


def _layout(method: Sparsifier, codec: OneRound, numel: int) -> Layout:
    if method.traits().variable_length:
        return varying_layout(codec, numel)
    return _usual_layout(method, codec, numel)


def _usual_layout(method: Sparsifier, codec: OneRound, numel: int) -> Layout:
    """The same as if as many entries were chosen as is usual."""
    count = method.count(numel)
    return counted_layout(codec, numel, count) if method.sends_indices else codec.layout(count)


def _nbytes(method: Sparsifier, codec: OneRound, shape: Sequence[int]) -> int:
    """The length of a message, or of a usual one where it varies."""
    numel = torch.Size(shape).numel()
    head = (
        packed_bytes(None, [varying_layout(codec, numel)]) if method.traits().variable_length else 0
    )
    return head + packed_bytes(None, [_usual_layout(method, codec, numel)])


def _draft(method: ThresholdSparsifier, codec: Cast, ef: EFInput, ctx: EncodeContext) -> Parts:
    aim = method.aim(ef.grad.numel(), ctx)
    return kernels.at(ef.grad).tell(ef, aim, codec.dtype)


def _take(method: Sparsifier, codec: OneRound, ef: EFInput, ctx: EncodeContext) -> Parts:
    if isinstance(method, ThresholdSparsifier) and isinstance(codec, Cast):
        return trimmed(_draft(method, codec, ef, ctx), ef.grad.numel())
    index = method.select(ef, ctx)
    inner = ctx._replace(shape=(index.numel(),))
    if ef.residual_out is None:
        values = codec.compress(ef.grad[index], inner)
    elif isinstance(codec, Cast):
        values = (kernels.at(index).lift(ef.residual_out, index, codec.dtype),)
    else:
        chosen = ef.residual_out[index]
        values = codec.compress(chosen, inner)
        values = tuple(v.clone() if v.data_ptr() == chosen.data_ptr() else v for v in values)
        codec.decode_add(chosen, [values], -1.0, inner)
        ef.residual_out.index_copy_(0, index, chosen)
    if not method.sends_indices:
        return values
    positions = pack_index(index, ef.grad.numel())
    if method.traits().variable_length:
        # Filled where it is: a copy from the host would wait.
        count = torch.full((1,), index.numel(), dtype=torch.int32, device=index.device)
        return (count, positions, *values)
    return (positions, *values)


def _add_to(
    method: Sparsifier,
    codec: OneRound,
    out: Tensor,
    messages: Sequence[Parts],
    weight: float,
    ctx: EncodeContext,
) -> None:
    if method.traits().variable_length:
        said = each_said(codec, [(parts[0], parts[2:]) for parts in messages], weight, ctx)
        rest = weight if isinstance(codec, Cast) else 1.0
        kernels.at(out).add_told(out, [parts[1] for parts in messages], said, rest)
        return
    # All at once: each entry is read and written once for all messages that lie in the cache.
    values = [parts[1:] if method.sends_indices else parts for parts in messages]
    rows, rest = said_of(codec, values, method.count(out.numel()), weight, ctx)
    if method.sends_indices:
        add_packed(out, torch.stack([parts[0] for parts in messages]), rows, rest)
    else:
        kernels.at(out).add_at(out, method.select(EFInput(out), ctx), rows, rest)


def check_format(method: str, values: str) -> None:
    """Raises ConfigError unless `values` names a number format."""
    if values not in FORMATS:
        raise ConfigError(f"{method}: values must be one of {[*FORMATS]}, got {values!r}")


def count_of(ratio: float, numel: int) -> int:
    """How many entries a ratio means: at least one where there is any."""
    return min(numel, max(1, round(ratio * numel)))
