"""What a compressor must be: one message a worker, or a conversation of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.kernels.validation import check_floating, check_given
from gradwire.types import Given, Layout, Parts, Payload, Rounds, State, Turn
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
    feedback as a contraction does, but only beside a memory that `keeps_apart` what waits."""
    varies: bool = False
    """The length of a message depends on what it says."""
    waits: bool = False
    """On a GPU it makes the host wait, as a singular value decomposition does."""
    by_step: bool = False
    """What it does depends on the step's number in more than its random keys."""
    votes: bool = False
    """Messages are votes: the majority of them counts, not their mean."""
    everywhere: bool = False
    """Harmless on small and one-dimensional tensors too, so none needs to travel dense."""
    shows: bool = False
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
    def encode(self, x: Tensor, turn: Turn | None = None) -> Payload:
        """What one worker would send for `x`."""

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """What the payload says, as float32 in the shape of the encoded tensor.

        Raises WireError where it is no message of this method.
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that one worker says for a tensor of this shape (variable lengths counted as 0)."""


def check_payload(payload: object, layout: Callable[[Turn], Layout]) -> None:
    """Raises an error by name unless this is a payload of such a layout: kernels trust lengths."""
    if not isinstance(payload, Payload):
        raise ConfigError(f"decode: expected what encode returns, got {type(payload).__name__}")
    check_parts(payload.parts, layout(payload.turn))


class OneRound(Compressor):
    """One message a worker: `compress` writes it and `add_to` reads any number of them."""

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """The parts of a message about `numel` elements."""

    @abstractmethod
    def compress(self, x: Tensor, turn: Turn) -> Parts:
        """The message about `x` (flat, contiguous). May return `x` itself as a part."""

    @abstractmethod
    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        """Adds `weight` times what each message says to `out` (flat), in the order given."""

    def encode(self, x: Tensor, turn: Turn | None = None) -> Payload:
        flat, turn = flat32(x), turn or Turn(tuple(x.shape))
        parts = self.compress(flat, turn)
        return Payload(parts, turn, packed_bytes([parts], [self.layout(x.numel())]))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda turn: self.layout(turn.numel))
        out = torch.zeros(payload.turn.numel, device=payload.parts[0].device)
        self.add_to(out, [payload.parts], 1.0, payload.turn)
        return out.view(payload.turn.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        return packed_bytes(None, [self.layout(torch.Size(shape).numel())])


class Fused(OneRound):
    """A method whose kernel adds the residual, encodes, and leaves the rest in fewer passes."""

    @abstractmethod
    def take(self, given: Given, turn: Turn) -> Parts:
        """The message about `given.total()`; `given.left` then holds what it does not say.

        Both `given.residual` and `given.left` are there, and may be the same.
        """


class ManyRounds(Compressor):
    """A method that holds a conversation of its own, or remembers between steps.

    `Talker` says what `units` and those after it mean.
    """

    how: ClassVar[str]
    """The exchange that its rounds are like; lanes that go dense beside it take that one."""
    units: ClassVar[tuple[str, ...]] = ()
    shards: ClassVar[tuple[str, ...]] = ()
    unison: ClassVar[int] = 1
    owed: ClassVar[tuple[str, ...]] = ()
    steady: ClassVar[bool] = True
    """What is not the same at every step is in its traits."""

    @property
    def shows(self) -> bool:
        """Whether its first message is not finite where any entry is not."""
        return self.traits().shows

    @abstractmethod
    def state(self, turn: Turn, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


def flat32(x: Tensor) -> Tensor:
    """The entries of `x` as contiguous float32, without a copy where they already are."""
    check_floating(x)
    return x.detach().to(torch.float32).reshape(-1).contiguous()


def take(codec: OneRound, given: Given, turn: Turn) -> Parts:
    """Encodes what is given and leaves in `given.left` what the message does not say."""
    check_given(given)
    if given.left is None:
        return codec.compress(given.x, turn)
    if isinstance(codec, Fused) and given.residual is not None:
        return codec.take(given, turn)
    x = given.total()
    parts = codec.compress(x, turn)
    # A part that is x itself would change under our hands when the said is subtracted from x.
    parts = tuple(p.clone() if p.data_ptr() == x.data_ptr() else p for p in parts)
    codec.add_to(given.left, [parts], -1.0, turn)
    return parts
