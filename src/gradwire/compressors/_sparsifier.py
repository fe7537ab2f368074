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
from gradwire.base import Fused, OneRound, Traits
from gradwire.compressors._cast import Cast
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.errors import ConfigError, WireError
from gradwire.kernels.specs import Aim
from gradwire.types import Field, Given, Layout, Parts, Turn
from gradwire.wire.indices import add_packed, check_index, index_bytes, index_field, pack_index
from gradwire.wire.layout import most_bytes, packed_bytes


def counted_layout(codec: OneRound, numel: int, count: int) -> Layout:
    """Of a message about `count` entries of `numel`: their positions, then their values."""
    inner = codec.layout(count)

    def check(parts: Parts) -> None:
        check_index(parts[0], numel, count)
        if inner.check is not None:
            inner.check(parts[1:])

    return Layout((index_field(numel, count), *inner.fields), check, most_bytes(numel))


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
    return Layout(fields, check, most_bytes(numel))


def said_of(
    codec: OneRound, messages: Sequence[Parts], count: int, weight: float, turn: Turn
) -> tuple[Tensor, float]:
    """What each message says of its `count` entries, and the weight that they still have to get."""
    if isinstance(codec, Cast):
        return torch.stack([parts[0] for parts in messages]), weight
    rows = torch.zeros(len(messages), count, device=messages[0][0].device)
    for row, parts in zip(rows, messages, strict=True):
        codec.add_to(row, [parts], weight, turn._replace(shape=(count,)))
    return rows, 1.0


def each_said(
    codec: OneRound, messages: Sequence[tuple[Tensor, Parts]], weight: float, turn: Turn
) -> list[Tensor]:
    """The same for messages of their own lengths, each with its count."""
    if isinstance(codec, Cast):
        return [values for _, (values,) in messages]
    # Asked all at once, so that the host waits once.
    counts = torch.cat([count for count, _ in messages]).tolist()
    rows = [
        said_of(codec, [parts], count, weight, turn)[0]
        for count, (_, parts) in zip(counts, messages, strict=True)
    ]
    return [row.view(-1) for row in rows]


ValueFormat: TypeAlias = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, Cast] = {"fp32": NoCompression(), "bf16": Bf16(), "fp16": Fp16()}


class Sparsifier(Fused):
    """A method that chooses entries; how they are told is the same for all."""

    values: ValueFormat
    told: ClassVar[bool]
    """Whether positions travel. Where not, `select` looks at the size of `x` alone, not at `x`."""

    @abstractmethod
    def count(self, numel: int) -> int:
        """How many entries of `numel` are chosen; about how many where `traits().varies`."""

    @abstractmethod
    def select(self, given: Given, turn: Turn) -> Tensor:
        """The positions of the chosen entries of `given.total()`: int64, ascending, distinct.

        Calls `given.total()`, or does the same in a kernel.
        """

    def overhear(self, given: Given, turn: Turn) -> None:
        """Another rank chooses for this one: only calls `given.total()`."""
        given.total()

    def layout(self, numel: int) -> Layout:
        return _layout(self, FORMATS[self.values], numel)

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        return _take(self, FORMATS[self.values], Given(x), turn)

    def take(self, given: Given, turn: Turn) -> Parts:
        return _take(self, FORMATS[self.values], given, turn)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        _add_to(self, FORMATS[self.values], out, messages, weight, turn)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self, FORMATS[self.values], shape)


class Passing(Sparsifier):
    """A sparsifier that lets pass what reaches a threshold, however many entries that are."""

    bears_zeros: ClassVar[bool] = False
    """Whether entries are chosen by the same rule where zeros stand beside them."""

    @abstractmethod
    def aim(self, numel: int, turn: Turn) -> Aim:
        """How the threshold for `numel` entries is found, and the most that may pass."""

    def select(self, given: Given, turn: Turn) -> Tensor:
        return kernels.at(given.x).passing(given, self.aim(given.x.numel(), turn))

    def draft(self, given: Given, turn: Turn) -> Parts:
        """The message in room for the longest one: the host is not told yet how long it is.

        On a GPU nothing waits, so that a CUDA graph can hold it; `trimmed` then asks.
        """
        return _draft(self, FORMATS[self.values], given, turn)


def trimmed(draft: Parts, numel: int) -> Parts:
    """The message of a draft: here the host waits for its length."""
    count = int(draft[0])
    return draft[0], draft[1][: index_bytes(numel, count)], draft[2][:count]


@dataclass(frozen=True)
class Pipeline(Fused):
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
            varies=first.varies or second.varies,
            waits=first.waits or second.waits,
            by_step=first.by_step or second.by_step,
            votes=second.votes,
            # What is not finite is among the chosen, and the second shows it of them.
            shows=first.shows and second.shows,
            why_not=first.why_not or second.why_not,
        )

    def layout(self, numel: int) -> Layout:
        return _layout(self.sparsifier, self.quantiser, numel)

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        return _take(self.sparsifier, self.quantiser, Given(x), turn)

    def take(self, given: Given, turn: Turn) -> Parts:
        return _take(self.sparsifier, self.quantiser, given, turn)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        _add_to(self.sparsifier, self.quantiser, out, messages, weight, turn)

    def nbytes(self, shape: Sequence[int]) -> int:
        return _nbytes(self.sparsifier, self.quantiser, shape)


def _layout(method: Sparsifier, codec: OneRound, numel: int) -> Layout:
    if method.traits().varies:
        return varying_layout(codec, numel)
    return _usual_layout(method, codec, numel)


def _usual_layout(method: Sparsifier, codec: OneRound, numel: int) -> Layout:
    """The same as if as many entries were chosen as is usual."""
    count = method.count(numel)
    return counted_layout(codec, numel, count) if method.told else codec.layout(count)


def _nbytes(method: Sparsifier, codec: OneRound, shape: Sequence[int]) -> int:
    """The length of a message, or of a usual one where it varies."""
    numel = torch.Size(shape).numel()
    head = packed_bytes(None, [varying_layout(codec, numel)]) if method.traits().varies else 0
    return head + packed_bytes(None, [_usual_layout(method, codec, numel)])


def _draft(method: Passing, codec: Cast, given: Given, turn: Turn) -> Parts:
    aim = method.aim(given.x.numel(), turn)
    return kernels.at(given.x).tell(given, aim, codec.dtype)


def _take(method: Sparsifier, codec: OneRound, given: Given, turn: Turn) -> Parts:
    if isinstance(method, Passing) and isinstance(codec, Cast):
        return trimmed(_draft(method, codec, given, turn), given.x.numel())
    index = method.select(given, turn)
    inner = turn._replace(shape=(index.numel(),))
    if given.left is None:
        values = codec.compress(given.x[index], inner)
    elif isinstance(codec, Cast):
        values = (kernels.at(index).lift(given.left, index, codec.dtype),)
    else:
        chosen = given.left[index]
        values = codec.compress(chosen, inner)
        values = tuple(v.clone() if v.data_ptr() == chosen.data_ptr() else v for v in values)
        codec.add_to(chosen, [values], -1.0, inner)
        given.left.index_copy_(0, index, chosen)
    if not method.told:
        return values
    positions = pack_index(index, given.x.numel())
    if method.traits().varies:
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
    turn: Turn,
) -> None:
    if method.traits().varies:
        said = each_said(codec, [(parts[0], parts[2:]) for parts in messages], weight, turn)
        rest = weight if isinstance(codec, Cast) else 1.0
        kernels.at(out).add_told(out, [parts[1] for parts in messages], said, rest)
        return
    # All at once: each entry is read and written once for all messages that lie in the cache.
    values = [parts[1:] if method.told else parts for parts in messages]
    rows, rest = said_of(codec, values, method.count(out.numel()), weight, turn)
    if method.told:
        add_packed(out, torch.stack([parts[0] for parts in messages]), rows, rest)
    else:
        kernels.at(out).add_at(out, method.select(Given(out), turn), rows, rest)


def check_format(method: str, values: str) -> None:
    """Raises ConfigError unless `values` names a number format."""
    if values not in FORMATS:
        raise ConfigError(f"{method}: values must be one of {[*FORMATS]}, got {values!r}")


def count_of(ratio: float, numel: int) -> int:
    """How many entries a ratio means: at least one where there is any."""
    return min(numel, max(1, round(ratio * numel)))
