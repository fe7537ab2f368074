"""Targets of the fuzzer: a decoder alone, or one rank in the middle of a small step.

The cases are every method and pipeline of the catalogue under every exchange that can carry it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.base.aggregation import Aggregation
from gradwire.bench.fuzz.guard_pages import Guarded
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.engine.plan import make_plan, open_lane
from gradwire.engine.step import exchange, together
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, exchange_classes, find_layers, format_spec, parse
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack

ROOM_BYTES = 1 << 16

DECODE = "decode"
"""In the place of an exchange: the decoder alone."""


@dataclass(frozen=True)
class Case:
    """A method under an exchange, or its decoder alone."""

    spec: str
    exchange: str

    @property
    def ranks(self) -> int:
        """Few; two nodes where there are nodes."""
        layers = None if self.exchange == DECODE else find_layers(self.exchange)
        return 3 if layers is None else 2 * layers.node

    def __str__(self) -> str:
        return f"{self.spec} by {self.exchange}"


class Place(NamedTuple):
    """An answer of an honest step that could have been another one."""

    call: int
    rank: int
    said: Tensor
    """As it was said, in bytes."""
    fixed: bool
    """Whether the receiver itself has made the room for it, so that its length cannot change."""


class Target(ABC):
    """Hears one message after the other, and remembers none of them."""

    places: list[Place]

    @abstractmethod
    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        """What becomes of the gradient when these bytes come in that place.

        Message and gradient lie beside pages that kill who touches them, both at the same end.
        """

    @abstractmethod
    def spoilt(self) -> str:
        """What the messages so far have changed for later steps; nothing, if all is well."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether nothing has changed, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


NUMELS = (1009, 74)
"""No multiple of anything; a tensor, and what a shard of it may be."""


class Decoder(Target):
    """Hears messages about tensors of some sizes; `call` is the number of the size."""

    def __init__(self, codec: OneRound) -> None:
        self._codec = codec
        self._turns = [EncodeContext((numel,), 1, 2, step=1) for numel in NUMELS]
        self._layouts = [codec.layout(numel) for numel in NUMELS]
        self._room, self._mail = Guarded(ROOM_BYTES), Guarded(ROOM_BYTES)
        dice = torch.Generator().manual_seed(0)
        self._starts = [torch.randn(numel, generator=dice) for numel in NUMELS]
        self.places = []
        for call, (ctx, layout) in enumerate(zip(self._turns, self._layouts, strict=True)):
            parts = codec.compress(torch.randn(ctx.numel, generator=dice), ctx)
            self.places.append(Place(call, 1, pack([parts], [layout]), fixed=False))

    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        out = self._room.hold(self._starts[place.call], at_end=at_end)
        buffer = self._mail.hold(message, at_end=at_end)
        parts = unpack(buffer, [self._layouts[place.call]])
        self._codec.decode_add(out, parts, 0.5, self._turns[place.call])
        return out

    def spoilt(self) -> str:
        return ""


SHAPE = (13, 17)
"""Small, so that messages are many; odd, so that last bytes and shards are not full."""


class StepReport(NamedTuple):
    """What a rank was answered in one call."""

    kind: str
    buffers: list[Tensor]


class Listener(Target):
    """Rank 0 of a case, and what it heard in a step where nobody lied."""

    def __init__(self, case: Case) -> None:
        plan = make_plan(case.spec, None, case.exchange, [torch.zeros(SHAPE)], case.ranks)
        # Not step 0, in which the error is measured too.
        contexts = [EncodeContext(SHAPE, rank, case.ranks, step=1) for rank in range(case.ranks)]
        cpu = torch.device("cpu")
        self._lanes = [
            open_lane("w", plan.compressor, plan.memory, plan.exchange, ctx, cpu)
            for ctx in contexts
        ]
        dice = torch.Generator().manual_seed(0)
        self._grads = [torch.randn(SHAPE, generator=dice) for _ in contexts]
        self._room, self._mail = Guarded(ROOM_BYTES), Guarded(ROOM_BYTES)
        self._tape: list[StepReport] = []
        talks = [self._talk(rank, grad.clone()) for rank, grad in enumerate(self._grads)]
        Simulated(case.ranks).run([_taped(talks[0], self._tape), *talks[1:]])
        self.places = [
            Place(call, rank, said.clone().view(torch.uint8), heard.kind in ("mean", "broadcast"))
            for call, heard in enumerate(self._tape)
            for rank, said in enumerate(heard.buffers)
        ]
        self._before = self._remembers()

    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        grad = self._room.hold(self._grads[0].view(-1), at_end=at_end).view(SHAPE)
        talk = self._talk(0, grad)
        next(talk)
        for number, (kind, buffers) in enumerate(self._tape):
            # Means are the receiver's to write on; messages are not.
            answer = [b.clone() for b in buffers] if kind == "mean" else list(buffers)
            if number == place.call:
                held = self._mail.hold(message, at_end=at_end)
                answer[place.rank] = held.view(answer[place.rank].dtype)
            try:
                talk.send(answer)
            except StopIteration:
                return grad
        raise AssertionError("the conversation goes on after the last answer")

    def spoilt(self) -> str:
        pairs = zip(self._before, self._remembers(), strict=True)
        if not all(same_bits(one, other) for one, other in pairs):
            return "what the lane remembers has changed"
        heard = [b.view(torch.uint8) for one in self._tape for b in one.buffers]
        if not all(same_bits(p.said, b) for p, b in zip(self.places, heard, strict=True)):
            return "a message was written on"
        return ""

    def _remembers(self) -> list[Tensor]:
        """Copies of all that the lane keeps for later steps."""
        lane = self._lanes[0]
        return [t.clone() for t in (*lane.memory_state.values(), *lane.aggregator_state.values())]

    def _talk(self, rank: int, grad: Tensor) -> CollectiveProgram[list[Tensor]]:
        return together([exchange(grad, self._lanes[rank])])


def _taped(
    talk: CollectiveProgram[list[Tensor]], tape: list[StepReport]
) -> CollectiveProgram[list[Tensor]]:
    answer: Sequence[Tensor] | None = None
    while True:
        try:
            call = next(talk) if answer is None else talk.send(list(answer))
        except StopIteration as end:
            result: list[Tensor] = end.value
            return result
        answer = yield call
        tape.append(StepReport(call.kind, [buffer.clone() for buffer in answer]))


def all_specs() -> list[str]:
    """Single methods in all their example settings, pipelines in the usual one of each half."""
    singles = [
        format_spec(method(**example))
        for method in compressor_classes().values()
        for example in method.examples
    ]
    return [*singles, *_pipelines()]


def cases_of(spec: str) -> list[Case]:
    """The decoder alone, where one message is all; then every legal exchange."""
    ways = _exchanges()
    if "|" not in spec:
        ways += [f"gather:aggregate={name}" for name in get_args(Aggregation) if name != "mean"]
    cases = [case for way in ways if _legal(case := Case(spec, way))]
    return [Case(spec, DECODE), *cases] if isinstance(parse(spec), OneRound) else cases


def open_target(case: Case) -> Target:
    if case.exchange != DECODE:
        return Listener(case)
    codec = parse(case.spec)
    assert isinstance(codec, OneRound)
    return Decoder(codec)


def _exchanges() -> list[str]:
    return [
        name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
        for name, cls in exchange_classes().items()
        for example in cls.examples
    ]


def _pipelines() -> Iterator[str]:
    usual = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
    for one, two in product(usual, usual):
        try:
            yield format_spec(parse(f"{one} | {two}"))
        except ConfigError:
            continue


def _legal(case: Case) -> bool:
    try:
        make_plan(case.spec, None, case.exchange, [torch.zeros(SHAPE)], case.ranks)
    except ConfigError:
        return False
    return True
