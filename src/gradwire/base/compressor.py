"""Base classes of compressors: one message per rank (`OneRound`), or several (`MultiRound`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.kernels.validation import check_ef_input, check_floating
from gradwire.types import EFInput, EncodeContext, Layout, Parts, Payload, Rounds, State
from gradwire.wire.layout import check_parts, packed_bytes

Family: TypeAlias = Literal["dense", "quantisation", "sparsification", "hybrid", "low rank"]

F = TypeVar("F", bound=Callable[..., object])


def memoized(method: F) -> F:
    """Caches a pure method of a frozen compressor, by the compressor's parameters and arguments.

    Steps ask for traits and layouts over and over. Keys and results hold numbers, no gradients.
    """
    return cast(F, lru_cache(maxsize=1024)(method))


class Traits(NamedTuple):
    """Properties that decide which memories and exchanges a compressor may be combined with."""

    summable: bool = False
    """Messages may be summed in transit, by an all-reduce."""
    rounds_sums: bool = False
    """Summing messages rounds, and no residual holds that rounding error."""
    unbiased: bool = False
    """The expectation of the decoded message is the input."""
    contraction: bool = False
    """The decoded message is closer to the input than zero is, so error feedback converges."""
    why_not: str = ""
    """The reason why it is no contraction, for the error message."""
    exact: bool = False
    """The decoded message is the input itself, so that there is no compression error to keep."""
    accumulates: bool = False
    """It sends an entry once its residual is large enough, which bounds the residual: as with a
    contraction, error feedback converges, but needs a memory that `separates_residual`."""
    variable_length: bool = False
    """The length of a message depends on the values."""
    syncs_host: bool = False
    """On a GPU it synchronises the host, as a singular value decomposition does."""
    step_dependent: bool = False
    """Its work depends on the step number beyond the random keys."""
    is_vote: bool = False
    """Messages are votes, of which the majority is taken instead of the mean."""
    suits_small_tensors: bool = False
    """It suits small and one-dimensional tensors too, so none needs to be sent dense."""
    propagates_nonfinite: bool = False
    """A non-finite input always yields a non-finite value in the first message, so the guard checks
    the message only."""
    block: int = 1
    """Number of consecutive entries that are encoded together; where large tensors are cut into
    chunks, these are multiples of it."""


class Compressor(ABC):
    """A method of the catalogue, or a user's own: a frozen dataclass of its parameters.

    Class and fields are its identity, which ranks and saved states compare (`gradwire.identity`).
    """

    examples: ClassVar[Sequence[Mapping[str, object]]]
    """Settings that tests, benchmarks and tables try, the usual one first."""
    family: ClassVar[Family]
    paper: ClassVar[str]
    message: ClassVar[str]
    """The parts of a message in words, for docs/reference/wire.md and the page of the method."""

    @abstractmethod
    def traits(self) -> Traits: ...

    @abstractmethod
    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        """Returns the message that one rank would send for `x`."""

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """Returns the decoded payload, as float32 in the shape of the encoded tensor.

        Raises WireError if it is not a message of this method.
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the message length for a tensor of this shape (variable lengths count as 0)."""


def check_payload(payload: object, layout: Callable[[EncodeContext], Layout]) -> None:
    """Raises ConfigError or WireError unless the payload has this layout: kernels trust lengths."""
    if not isinstance(payload, Payload):
        raise ConfigError(f"decode: expected what encode returns, got {type(payload).__name__}")
    check_parts(payload.parts, layout(payload.ctx))


class OneRound(Compressor):
    """One message per rank: `compress` encodes it, `decode_add` decodes any number of them."""

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """Returns the parts of a message of `numel` elements."""

    @abstractmethod
    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        """Encodes `x` (flat, contiguous). May return `x` itself as a part."""

    @abstractmethod
    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        """Adds `weight` times each decoded message to `out` (flat), in the order given."""

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        parts = self.compress(flat, ctx)
        return Payload(parts, ctx, packed_bytes([parts], [self.layout(x.numel())]))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: self.layout(ctx.numel))
        out = torch.zeros(payload.ctx.numel, device=payload.parts[0].device)
        self.decode_add(out, [payload.parts], 1.0, payload.ctx)
        return out.view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        return packed_bytes(None, [self.layout(torch.Size(shape).numel())])


class FusedOneRound(OneRound):
    """A method whose kernel adds the residual, encodes and writes the new residual in one go."""

    @abstractmethod
    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        """Encodes `ef.total()` and writes the compression error to `ef.residual_out`.

        Both `ef.residual` and `ef.residual_out` are given, and may be the same tensor.
        """


class MultiRound(Compressor):
    """A method with several rounds, or with state between steps.

    `Aggregator` documents `loss_scaled_keys` and what follows.
    """

    rounds_like: ClassVar[str]
    """The exchange that its rounds resemble; dense lanes beside it use that exchange."""
    loss_scaled_keys: ClassVar[tuple[str, ...]] = ()
    sharded_keys: ClassVar[tuple[str, ...]] = ()
    ranks_per_replica: ClassVar[int] = 1
    unsent_keys: ClassVar[tuple[str, ...]] = ()
    graph_safe: ClassVar[bool] = True
    """Work that differs between steps is declared in the traits."""

    @property
    def propagates_nonfinite(self) -> bool:
        return self.traits().propagates_nonfinite

    @abstractmethod
    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


def flat32(x: Tensor) -> Tensor:
    """Returns the entries of `x` as contiguous float32, as a view if they are that already."""
    check_floating(x)
    return x.detach().to(torch.float32).reshape(-1).contiguous()


def encode_with_feedback(codec: OneRound, ef: EFInput, ctx: EncodeContext) -> Parts:
    """Encodes `ef.total()` and writes the compression error to `ef.residual_out`, if given."""
    check_ef_input(ef)
    if ef.residual_out is None:
        return codec.compress(ef.grad, ctx)
    if isinstance(codec, FusedOneRound) and ef.residual is not None:
        return codec.encode_fused(ef, ctx)
    x = ef.total()
    parts = codec.compress(x, ctx)
    # A part that is x itself would change when the decoded message is subtracted from x.
    parts = tuple(p.clone() if p.data_ptr() == x.data_ptr() else p for p in parts)
    codec.decode_add(ef.residual_out, [parts], -1.0, ctx)
    return parts
