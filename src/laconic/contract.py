"""What a compressor, a memory and an exchange must be: the abstract classes of the catalogue.

A method is a frozen dataclass (the algorithm *is* its parameters) that derives from `OneRound` when
one message says it all (`cast.Cast` and `sparse.Sparsifier` are ready-made kinds of it), or from
`ManyRounds` when it needs a conversation.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from laconic.kernels.door import check_floating, check_given
from laconic.types import Given, Layout, Parts, Payload, Rounds, State, Turn
from laconic.wire.layout import packed_bytes

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
        """What the payload says, as float32 in the shape of the encoded tensor."""

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that one worker says for a tensor of this shape (variable lengths counted as 0)."""


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
        turn = turn or Turn(tuple(x.shape))
        parts = self.compress(flat32(x), turn)
        return Payload(parts, turn, packed_bytes([parts], [self.layout(x.numel())]))

    def decode(self, payload: Payload) -> Tensor:
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


class Talker(Protocol):
    """Anything that can hold the conversation about one gradient.

    The state that `rounds` gets is a draft: it puts new tensors in the place of old ones and never
    writes into those, since a step that fails or overflows must leave no trace.
    """

    @property
    def units(self) -> tuple[str, ...]: ...

    @property
    def shards(self) -> tuple[str, ...]: ...

    @property
    def unison(self) -> int: ...

    @property
    def owed(self) -> tuple[str, ...]: ...

    @property
    def steady(self) -> bool: ...

    @property
    def shows(self) -> bool: ...

    def state(self, turn: Turn, device: torch.device) -> State: ...

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


class ManyRounds(Compressor):
    """A method that holds a conversation of its own, or remembers between steps."""

    how: ClassVar[str]
    """The exchange that its rounds are like; lanes that go dense beside it take that one."""
    units: ClassVar[tuple[str, ...]] = ()
    """What of its state is in units of the gradient, and so follows the loss scale."""
    shards: ClassVar[tuple[str, ...]] = ()
    """What of its state is this rank's shard of a whole."""
    unison: ClassVar[int] = 1
    """So many consecutive ranks talk as one, and remember the same."""
    owed: ClassVar[tuple[str, ...]] = ()
    """What of its state is measured in what waits to be sent, and is rescaled along with it."""
    steady: ClassVar[bool] = True
    """Its part of a conversation is the same at every step; what is not is in its traits."""

    @property
    def shows(self) -> bool:
        """Whether its first message is not finite where any entry is not."""
        return self.traits().shows

    @abstractmethod
    def state(self, turn: Turn, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


class Memory(ABC):
    """What becomes of the part of a gradient that was not sent.

    A step reads `now`, what was kept, and fills `then`, what will be kept if the step counts, by
    the end of `after`. Both may be one and the same, where nothing has to be taken back.
    """

    examples: ClassVar[Sequence[Mapping[str, object]]]
    needs_contraction: ClassVar[bool]
    units: ClassVar[tuple[str, ...]]
    """What of its state is in units of the gradient, and so follows the loss scale."""
    keeps_apart: ClassVar[bool]
    """It gives the gradient as it came, and what waits of those before beside it."""
    owes: ClassVar[bool]
    """What was not said is a step still to be made, and not the difference to a known gradient."""

    @abstractmethod
    def state(self, numel: int, device: torch.device) -> State: ...

    @abstractmethod
    def before(self, grad: Tensor, now: State, then: State) -> Given:
        """What the lane has to say for this gradient (flat), which stays as it is."""

    @abstractmethod
    def after(self, given: Given, mean: Tensor, now: State, then: State) -> Tensor:
        """Keeps `given.left`, and returns what the gradient becomes: mostly the mean that came."""

    @abstractmethod
    def rescale(self, state: State, factor: float) -> None:
        """Multiplies what waits to be sent, when the learning rate has changed by 1/`factor`."""

    @abstractmethod
    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        """The state that stands for those of other ranks, each with its weight.

        Weights are for what waits; a memory that keeps gradients takes their plain mean.
        """

    @abstractmethod
    def waiting(self, state: State) -> Tensor | None:
        """What has been given and not been sent yet, if that is what this memory keeps."""


class Exchange(ABC):
    """A way for one-round messages to become a mean: a compressor wrapped in it is a talker."""

    examples: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Settings that tests try."""

    @property
    def units(self) -> tuple[str, ...]:
        """What of its state is in units of the gradient, and so follows the loss scale."""
        return ()

    @property
    def shards(self) -> tuple[str, ...]:
        """What of its state is this rank's shard of a whole."""
        return ()

    @property
    def unison(self) -> int:
        """So many consecutive ranks talk as one, and remember the same."""
        return 1

    @property
    def owed(self) -> tuple[str, ...]:
        """What of its state is measured in what waits to be sent, and is rescaled along with it."""
        return ()

    @property
    def steady(self) -> bool:
        """Whether its part of a conversation is the same at every step."""
        return True

    @property
    def shows(self) -> bool:
        """Whether its first message is not finite where any entry is not."""
        return False

    @abstractmethod
    def __init__(self, codec: OneRound) -> None: ...

    @classmethod
    @abstractmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Why this exchange cannot carry the compressor's messages, or None."""

    @abstractmethod
    def state(self, turn: Turn, device: torch.device) -> State: ...

    @abstractmethod
    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds: ...


class Layered(Exchange):
    """An exchange of nodes with `node` ranks each, around a talker that speaks for a whole node."""

    talker: Talker
    node: int

    @abstractmethod
    def __init__(self, talker: Talker, node: int) -> None: ...

    @classmethod
    def refuses(cls, codec: Compressor) -> str | None:
        """Nothing by itself: what is said between nodes is the talker's."""
        return None

    @property
    def units(self) -> tuple[str, ...]:
        return self.talker.units

    @property
    def shards(self) -> tuple[str, ...]:
        return self.talker.shards

    @property
    def owed(self) -> tuple[str, ...]:
        return self.talker.owed

    @property
    def steady(self) -> bool:
        return self.talker.steady

    @property
    def unison(self) -> int:
        return self.node


def carried_by(name: str, codec: Compressor) -> str | None:
    """Why an exchange that carries any one-round message cannot carry this one, or None."""
    if isinstance(codec, ManyRounds) and codec.how != name:
        return "it talks in rounds of its own"
    return None


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of the tensors, each with its weight, in the order given."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight:
            total.add_(tensor, alpha=weight)
    return total


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
