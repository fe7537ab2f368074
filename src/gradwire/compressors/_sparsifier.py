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
from gradwire.base import FusedOneRound, OneRound, Traits, memoized
from gradwire.compressors._cast import Cast, cast_layout, cast_values
from gradwire.errors import ConfigError, WireError
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.indices import add_packed, check_index, index_bytes, index_field, pack_index
from gradwire.wire.layout import max_bytes, packed_bytes

ValueCodec: TypeAlias = OneRound | torch.dtype
"""Encoding of the selected values: another method, or just a number format."""

ValueFormat: TypeAlias = Literal["fp32", "bf16", "fp16"]
VALUE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def values_layout(codec: ValueCodec, count: int) -> Layout:
    """Returns the layout of `count` values."""
    return cast_layout(codec, count) if isinstance(codec, torch.dtype) else codec.layout(count)


def fixed_layout(codec: ValueCodec, numel: int, count: int) -> Layout:
    """Returns the layout of a message with `count` of `numel` entries: positions, then values."""
    inner = values_layout(codec, count)

    def check(parts: Parts) -> None:
        check_index(parts[0], numel, count)
        if inner.check is not None:
            inner.check(parts[1:])

    return Layout((index_field(numel, count), *inner.fields), check, max_bytes(numel))


def variable_layout(codec: ValueCodec, numel: int) -> Layout:
    """Returns the layout of a message of any number of entries: count, positions, values.

    All lengths follow from the count and are checked against it.
    """

    def check(parts: Parts) -> None:
        count = int(parts[0])
        if not 0 <= count <= numel:
            raise WireError(f"message holds {count} entries of a tensor of {numel}")
        inner = values_layout(codec, count)
        fields = (index_field(numel, count), *inner.fields)
        for part, field in zip(parts[1:], fields, strict=True):
            if field.numel is not None and part.numel() != field.numel:
                raise WireError(
                    f"message has a part of {part.numel()} where {count} entries take {field.numel}"
                )
        check_index(parts[1], numel, count)
        if inner.check is not None:
            inner.check(parts[2:])

    values = [Field(field.dtype, None) for field in values_layout(codec, 0).fields]
    fields = (Field(torch.int32, 1), Field(torch.uint8, None), *values)
    return Layout(fields, check, max_bytes(numel))


def decode_rows(
    codec: ValueCodec, messages: Sequence[Parts], count: int, weight: float, ctx: EncodeContext
) -> tuple[Tensor, float]:
    """Returns the values of each message, one row each, and the weight still to be applied."""
    if isinstance(codec, torch.dtype):
        return torch.stack([parts[0] for parts in messages]), weight
    rows = torch.zeros(len(messages), count, device=messages[0][0].device)
    for row, parts in zip(rows, messages, strict=True):
        codec.decode_add(row, [parts], weight, ctx._replace(shape=(count,)))
    return rows, 1.0


def decode_each(
    codec: ValueCodec, messages: Sequence[tuple[Tensor, Parts]], weight: float, ctx: EncodeContext
) -> tuple[list[Tensor], float]:
    """Returns the values of messages of different lengths, and the weight still to be applied."""
    if isinstance(codec, torch.dtype):
        return [values for _, (values,) in messages], weight
    # All counts in one copy, so that the host waits once.
    counts = torch.cat([count for count, _ in messages]).tolist()
    rows = [
        decode_rows(codec, [parts], count, weight, ctx)[0]
        for count, (_, parts) in zip(counts, messages, strict=True)
    ]
    return [row.view(-1) for row in rows], 1.0


class Sparsifier(FusedOneRound):
    """Base class of sparsifiers: a subclass selects entries, this class encodes them."""

    values: ValueFormat
    sends_indices: ClassVar[bool]
    """True if positions are sent. If not, `select` depends on size and context, not on values."""
    message: ClassVar[str] = "positions, k values (fp32, bf16 or fp16)"

    @abstractmethod
    def count(self, numel: int) -> int:
        """Returns how many of `numel` entries are selected; the expected number if that varies."""

    @abstractmethod
    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        """Returns the positions of selected entries of `ef.total()`: int64, ascending, distinct.

        Also writes gradient plus residual to `ef.residual_out`, by `ef.total()` or in its kernel.
        """

    def accumulate_only(self, ef: EFInput, ctx: EncodeContext) -> None:
        """Calls `ef.total()` only, where another rank selects for this one."""
        ef.total()

    @memoized
    def layout(self, numel: int) -> Layout:
        return _layout(self, VALUE_DTYPES[self.values], numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return _encode(self, VALUE_DTYPES[self.values], EFInput(x), ctx)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        return _encode(self, VALUE_DTYPES[self.values], ef, ctx)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        _decode_add(self, VALUE_DTYPES[self.values], out, messages, weight, ctx)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self, VALUE_DTYPES[self.values], shape)


class ThresholdSparsifier(Sparsifier):
    """Base class of sparsifiers that select by a threshold, so that counts vary."""

    tolerates_zero_padding: ClassVar[bool] = False
    """True if zeros after the entries leave the selection as it is."""
    message: ClassVar = "count as int32, positions, values (fp32, bf16 or fp16)"

    @abstractmethod
    def threshold_spec(self, numel: int, ctx: EncodeContext) -> ThresholdSpec:
        """Returns how the threshold for `numel` entries is found, and the most that may pass."""

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        return kernels.on(ef.grad.device).select_by_threshold(
            ef, self.threshold_spec(ef.grad.numel(), ctx)
        )

    def encode_padded(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        """Returns the message in buffers for the longest one, before the host knows its length.

        On a GPU nothing waits, so that a CUDA graph can capture it; `trim_message` waits later.
        """
        return _encode_padded(self, VALUE_DTYPES[self.values], ef, ctx)


def trim_message(padded: Parts, numel: int) -> Parts:
    """Returns the message of padded buffers; waits until the host knows its length."""
    count = int(padded[0])
    return padded[0], padded[1][: index_bytes(numel, count)], padded[2][:count]


@dataclass(frozen=True)
class Pipeline(FusedOneRound):
    """A sparsifier whose selected values are encoded by another method: `topk | qsgd`."""

    sparsifier: Sparsifier
    quantiser: OneRound

    examples: ClassVar = ()
    family: ClassVar = "hybrid"
    paper: ClassVar = "Basu et al. 2019, arXiv:1906.02367"
    message: ClassVar = "positions, then the parts of the quantiser for k values"

    @memoized
    def traits(self) -> Traits:
        first, second = self.sparsifier.traits(), self.quantiser.traits()
        return Traits(
            summable=first.summable and second.summable,
            rounds_sums=second.rounds_sums,
            unbiased=first.unbiased and second.unbiased,
            # The error of the second acts on what the first selects, and adds to what it drops.
            contraction=first.contraction and second.contraction,
            variable_length=first.variable_length or second.variable_length,
            syncs_host=first.syncs_host or second.syncs_host,
            step_dependent=first.step_dependent or second.step_dependent,
            is_vote=second.is_vote,
            # Non-finite entries are among the selected, and the second propagates them.
            propagates_nonfinite=first.propagates_nonfinite and second.propagates_nonfinite,
            why_not=first.why_not or second.why_not,
            block=first.block,
        )

    @property
    def codec(self) -> ValueCodec:
        """The encoding of the values; a cast is only its number format."""
        return self.quantiser.dtype if isinstance(self.quantiser, Cast) else self.quantiser

    @memoized
    def layout(self, numel: int) -> Layout:
        return _layout(self.sparsifier, self.codec, numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return _encode(self.sparsifier, self.codec, EFInput(x), ctx)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        return _encode(self.sparsifier, self.codec, ef, ctx)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        _decode_add(self.sparsifier, self.codec, out, messages, weight, ctx)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self.sparsifier, self.codec, shape)


def _layout(method: Sparsifier, codec: ValueCodec, numel: int) -> Layout:
    if method.traits().variable_length:
        return variable_layout(codec, numel)
    return _typical_layout(method, codec, numel)


def _typical_layout(method: Sparsifier, codec: ValueCodec, numel: int) -> Layout:
    """Returns the layout for the expected number of entries."""
    count = method.count(numel)
    if method.sends_indices:
        return fixed_layout(codec, numel, count)
    return values_layout(codec, count)


def _nbytes(method: Sparsifier, codec: ValueCodec, shape: Sequence[int]) -> int:
    """Returns the length of a message, or of a typical one where it varies."""
    numel = torch.Size(shape).numel()
    head = (
        packed_bytes(None, [variable_layout(codec, numel)])
        if method.traits().variable_length
        else 0
    )
    return head + packed_bytes(None, [_typical_layout(method, codec, numel)])


def _encode_padded(
    method: ThresholdSparsifier, dtype: torch.dtype, ef: EFInput, ctx: EncodeContext
) -> Parts:
    spec = method.threshold_spec(ef.grad.numel(), ctx)
    return kernels.on(ef.grad.device).encode_by_threshold(ef, spec, dtype)


def _encode(method: Sparsifier, codec: ValueCodec, ef: EFInput, ctx: EncodeContext) -> Parts:
    if isinstance(method, ThresholdSparsifier) and isinstance(codec, torch.dtype):
        return trim_message(_encode_padded(method, codec, ef, ctx), ef.grad.numel())
    index = method.select(ef, ctx)
    if isinstance(codec, torch.dtype):
        values = _extract_values(codec, ef, index)
    else:
        values = _encode_values(codec, ef, index, ctx._replace(shape=(index.numel(),)))
    if not method.sends_indices:
        return values
    positions = pack_index(index, ef.grad.numel())
    if method.traits().variable_length:
        # Filled on the device: a copy from the host would wait.
        count = torch.full((1,), index.numel(), dtype=torch.int32, device=index.device)
        return (count, positions, *values)
    return (positions, *values)


def _extract_values(dtype: torch.dtype, ef: EFInput, index: Tensor) -> Parts:
    """Returns the selected values in a number format; their rounding error stays behind."""
    if ef.residual_out is None:
        return cast_values(ef.grad[index], dtype)
    return (kernels.on(index.device).extract(ef.residual_out, index, dtype),)


def _encode_values(codec: OneRound, ef: EFInput, index: Tensor, ctx: EncodeContext) -> Parts:
    """Returns the selected values encoded by another method; its error stays behind."""
    if ef.residual_out is None:
        return codec.compress(ef.grad[index], ctx)
    selected = ef.residual_out[index]
    values = codec.compress(selected, ctx)
    values = tuple(v.clone() if v.data_ptr() == selected.data_ptr() else v for v in values)
    codec.decode_add(selected, [values], -1.0, ctx)
    ef.residual_out.index_copy_(0, index, selected)
    return values


def _decode_add(
    method: Sparsifier,
    codec: ValueCodec,
    out: Tensor,
    messages: Sequence[Parts],
    weight: float,
    ctx: EncodeContext,
) -> None:
    if method.traits().variable_length:
        counted = [(parts[0], parts[2:]) for parts in messages]
        decoded, rest = decode_each(codec, counted, weight, ctx)
        kernels.on(out.device).add_packed_ragged(
            out, [parts[1] for parts in messages], decoded, rest
        )
        return
    # One kernel for all messages reads and writes each entry once while they are in the cache.
    values = [parts[1:] if method.sends_indices else parts for parts in messages]
    rows, rest = decode_rows(codec, values, method.count(out.numel()), weight, ctx)
    if method.sends_indices:
        add_packed(out, torch.stack([parts[0] for parts in messages]), rows, rest)
    else:
        kernels.on(out.device).add_at(out, method.select(EFInput(out), ctx), rows, rest)


def check_format(method: str, values: str) -> None:
    """Raises ConfigError unless `values` names a number format."""
    if values not in VALUE_DTYPES:
        raise ConfigError(f"{method}: values must be one of {[*VALUE_DTYPES]}, got {values!r}")


def count_for_ratio(ratio: float, numel: int) -> int:
    """Returns how many of `numel` entries a ratio is: at least one where there is any."""
    return min(numel, max(1, round(ratio * numel)))
