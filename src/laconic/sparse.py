"""Messages that are a choice of entries: positions, then values in a format of their own.

`Sparsifier` is the kind of method that chooses; `Pipeline` lets another method write the values.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor

from laconic.compressors.bf16 import Bf16
from laconic.compressors.fp16 import Fp16
from laconic.compressors.none import NoCompression
from laconic.contract import Fused, OneRound, Traits
from laconic.errors import ConfigError
from laconic.types import Given, Layout, Parts, Turn
from laconic.wire.indices import check_index, index_field, pack_index, unpack_index

ValueFormat: TypeAlias = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, OneRound] = {"fp32": NoCompression(), "bf16": Bf16(), "fp16": Fp16()}


class Sparsifier(Fused):
    """A method that chooses entries; how they are told is the same for all."""

    values: ValueFormat
    told: ClassVar[bool]
    """Whether positions travel. Where not, `select` looks at the size of `x` alone, not at `x`."""

    @abstractmethod
    def count(self, numel: int) -> int:
        """How many entries of `numel` are chosen."""

    @abstractmethod
    def select(self, given: Given, turn: Turn) -> Tensor:
        """The positions of the chosen entries of `given.total()`: int64, ascending, distinct.

        Calls `given.total()`, or does the same in a kernel.
        """

    def layout(self, numel: int) -> Layout:
        return _layout(self, FORMATS[self.values], numel)

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        return _take(self, FORMATS[self.values], Given(x), turn)

    def take(self, given: Given, turn: Turn) -> Parts:
        return _take(self, FORMATS[self.values], given, turn)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        _add_to(self, FORMATS[self.values], out, messages, weight, turn)


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


def _layout(method: Sparsifier, codec: OneRound, numel: int) -> Layout:
    count = method.count(numel)
    inner = codec.layout(count)
    if not method.told:
        return inner

    def check(parts: Parts) -> None:
        check_index(parts[0], numel, count)
        if inner.check is not None:
            inner.check(parts[1:])

    return Layout((index_field(numel, count), *inner.fields), check)


def _take(method: Sparsifier, codec: OneRound, given: Given, turn: Turn) -> Parts:
    index = method.select(given, turn)
    inner = turn._replace(shape=(index.numel(),))
    if given.left is None:
        values = codec.compress(given.x[index], inner)
    else:
        chosen = given.left[index]
        values = codec.compress(chosen, inner)
        values = tuple(v.clone() if v.data_ptr() == chosen.data_ptr() else v for v in values)
        codec.add_to(chosen, [values], -1.0, inner)
        given.left.index_copy_(0, index, chosen)
    return (pack_index(index, given.x.numel()), *values) if method.told else values


def _add_to(
    method: Sparsifier,
    codec: OneRound,
    out: Tensor,
    messages: Sequence[Parts],
    weight: float,
    turn: Turn,
) -> None:
    numel = out.numel()
    count = method.count(numel)
    inner = turn._replace(shape=(count,))
    for parts in messages:
        index = (
            unpack_index(parts[0], numel, count) if method.told else method.select(Given(out), turn)
        )
        values = out.new_zeros(count)
        codec.add_to(values, [parts[1:] if method.told else parts], weight, inner)
        out.index_add_(0, index, values)


def check_format(method: str, values: str) -> None:
    """Raises ConfigError unless `values` names a number format."""
    if values not in FORMATS:
        raise ConfigError(f"{method}: values must be one of {[*FORMATS]}, got {values!r}")


def count_of(ratio: float, numel: int) -> int:
    """How many entries a ratio means: at least one where there is any."""
    return min(numel, max(1, round(ratio * numel)))
