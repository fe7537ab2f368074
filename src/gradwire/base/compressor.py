"""What a compressor must be: one message a worker, or a conversation of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.kernels.validation import check_floating, check_given
from gradwire.types import EFInput, EncodeContext, Layout, Parts, Payload, Rounds, State
from gradwire.wire.layout import check_parts, packed_bytes

Family: TypeAlias = Literal["dense", "quantisation", "sparsification", "hybrid", "low rank"]


class Traits(NamedTuple):
    """What decides which memory and exchange a compressor may go with, and how it is guarded."""

    summable: bool = False
    """Messages may be added up on the way (an all-reduce does it)."""
    rounds_sums: bool = False
    """Adding them up rounds, and what is lost there is in nobody's residual."""
    unbiased: bool = False
    """The expectation of the decoded message is the input."""
    contraction: bool = False
    """The decoded message is closer to the input than zero is, so error feedback converges."""
    why_not: str = ""
    """Why it is no contraction, for the error message."""
    accumulates: bool = False
    """It says an entry once enough of it has piled up, and bounds what piles up: that serves error
    feedback as a contraction does, but only beside a memory that `separates_residual` what waits."""
    variable_length: bool = False
    """The length of a message depends on what it says."""
    syncs_host: bool = False
    """On a GPU it makes the host wait, as a singular value decomposition does."""
    step_dependent: bool = False
    """What it does depends on the step's number in more than its random keys."""
    is_vote: bool = False
    """Messages are votes: the majority of them counts, not their mean."""
    suits_small_tensors: bool = False
    """Harmless on small and one-dimensional tensors too, so none needs to travel dense."""
    propagates_nonfinite: bool = False
    """Where any entry is not finite, a number of the first message is not: who looks at that need
    not look at the gradient."""


class Compressor(ABC):
    """A method of the catalogue; its parameters are its fields."""

    examples: ClassVar[Sequence[Mapping[str, object]]]
    """Settings that tests, benchmarks and tables try, the usual one first."""
    family: ClassVar[Family]
    paper: ClassVar[str]

    @abstractmethod
    def traits(self) -> Traits: ...

    @abstractmethod
    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        """What one worker would send for `x`."""

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """What the payload says, as float32 in the shape of the encoded tensor.

        Raises WireError where it is no message of this method.
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that one worker says for a tensor of this shape (variable lengths counted as 0)."""


def check_payload(payload: object, layout: Callable[[EncodeContext], Layout]) -> None:
    """Raises an error by name unless this is a payload of such a layout: kernels trust lengths."""
    if not isinstance(payload, Payload):
        raise ConfigError(f"decode: expected what encode returns, got {type(payload).__name__}")
    check_parts(payload.parts, layout(payload.ctx))


class OneRound(Compressor):
    """One message a worker: `compress` writes it and `decode_add` reads any number of them."""

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """The parts of a message about `numel` elements."""

    @abstractmethod
    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        """The message about `x` (flat, contiguous). May return `x` itself as a part."""

    @abstractmethod
    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        """Adds `weight` times what each message says to `out` (flat), in the order given."""

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
    """A method whose kernel adds the residual, encodes, and leaves the rest in fewer passes."""

    @abstractmethod
    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        """The message about `ef.total()`; `ef.residual_out` then holds what it does not say.

        Both `ef.residual` and `ef.residual_out` are there, and may be the same.
        """


class MultiRound(Compressor):
    """A method that holds a conversation of its own, or remembers between steps.

    `Aggregator` says what `loss_scaled_keys` and those after it mean.
    """

    rounds_like: ClassVar[str]
    """The exchange that its rounds are like; lanes that go dense beside it take that one."""
    loss_scaled_keys: ClassVar[tuple[str, ...]] = ()
    sharded_keys: ClassVar[tuple[str, ...]] = ()
    ranks_per_replica: ClassVar[int] = 1
    unsent_keys: ClassVar[tuple[str, ...]] = ()
    graph_safe: ClassVar[bool] = True
    """What is not the same at every step is in its traits."""

    @property
    def propagates_nonfinite(self) -> bool:
        """Whether its first message is not finite where any entry is not."""
        return self.traits().propagates_nonfinite

    @abstractmethod
    def state(self, ctx: EncodeContext, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds: ...


def flat32(x: Tensor) -> Tensor:
    """The entries of `x` as contiguous float32, without a copy where they already are."""
    check_floating(x)
    return x.detach().to(torch.float32).reshape(-1).contiguous()


def encode_with_feedback(codec: OneRound, ef: EFInput, ctx: EncodeContext) -> Parts:
    """Encodes what is given and leaves in `ef.residual_out` what the message does not say."""
    check_given(ef)
    if ef.residual_out is None:
        return codec.compress(ef.grad, ctx)
    if isinstance(codec, FusedOneRound) and ef.residual is not None:
        return codec.encode_fused(ef, ctx)
    x = ef.total()
    parts = codec.compress(x, ctx)
    # A part that is x itself would change under our hands when the said is subtracted from x.
    parts = tuple(p.clone() if p.data_ptr() == x.data_ptr() else p for p in parts)
    codec.decode_add(ef.residual_out, [parts], -1.0, ctx)
    return parts
