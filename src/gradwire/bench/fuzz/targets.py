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
from gradwire.bench.fuzz.guard_pages import GuardedMemory
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import make_plan, open_lane
from gradwire.engine.step import BucketResult, lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, exchange_classes, format_spec, parse, parse_exchange
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack

MEMORY_BYTES = 1 << 16

DECODE = "decode"
"""Stands for the decoder alone, in place of an exchange."""


@dataclass(frozen=True)
class Case:
    """A method under an exchange, or its decoder alone."""

    spec: str
    exchange: str

    @property
    def ranks(self) -> int:
        """Number of ranks: 3, or two nodes for a hierarchical exchange."""
        node = None if self.exchange == DECODE else parse_exchange(self.exchange).node
        return 3 if node is None else 2 * node

    def __str__(self) -> str:
        return f"{self.spec} by {self.exchange}"


class InjectionPoint(NamedTuple):
    """An answer of a valid step that a mutated message can replace."""

    call: int
    rank: int
    message: Tensor
    """The valid message, in bytes."""
    fixed: bool
    """True if the receiver has allocated its buffer, so that its length cannot change."""


class Target(ABC):
    """Receives one message after the other, without effect on later ones."""

    points: list[InjectionPoint]

    @abstractmethod
    def receive(self, point: InjectionPoint, message: Tensor, *, at_end: bool = True) -> Tensor:
        """Returns the gradient after these bytes have arrived at that point.

        Message and gradient lie beside inaccessible pages, both at the same end.
        """

    @abstractmethod
    def damage(self) -> str:
        """Describes state that the messages so far have changed; empty if there is none."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns True if all bits are equal, those of NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


NUMELS = (1009, 74)
"""Sizes that no block size divides: of a tensor, and of a possible shard of it."""


class DecoderTarget(Target):
    """Decodes messages of tensors of some sizes; `call` is the index of the size."""

    def __init__(self, codec: OneRound) -> None:
        self._codec = codec
        self._contexts = [EncodeContext((numel,), 1, 2, step=1) for numel in NUMELS]
        self._layouts = [codec.layout(numel) for numel in NUMELS]
        self._gradient_memory, self._message_memory = (
            GuardedMemory(MEMORY_BYTES),
            GuardedMemory(MEMORY_BYTES),
        )
        rng = torch.Generator().manual_seed(0)
        self._starts = [torch.randn(numel, generator=rng) for numel in NUMELS]
        self.points = []
        for call, (ctx, layout) in enumerate(zip(self._contexts, self._layouts, strict=True)):
            parts = codec.compress(torch.randn(ctx.numel, generator=rng), ctx)
            self.points.append(InjectionPoint(call, 1, pack([parts], [layout]), fixed=False))

    def receive(self, point: InjectionPoint, message: Tensor, *, at_end: bool = True) -> Tensor:
        out = self._gradient_memory.hold(self._starts[point.call], at_end=at_end)
        buffer = self._message_memory.hold(message, at_end=at_end)
        parts = unpack(buffer, [self._layouts[point.call]])
        self._codec.decode_add(out, parts, 0.5, self._contexts[point.call])
        return out

    def damage(self) -> str:
        return ""


SHAPE = (13, 17)
"""Small, for many messages per second; odd, so that last bytes and shards are not full."""


class Answer(NamedTuple):
    """The answer that a rank received in one collective."""

    kind: str
    buffers: list[Tensor]


class StepTarget(Target):
    """Rank 0 of a case, with the answers that it received in a valid step."""

    def __init__(self, case: Case) -> None:
        plan = make_plan(case.spec, None, case.exchange, [torch.zeros(SHAPE)], case.ranks)
        # Not step 0, which also measures the error.
        contexts = [EncodeContext(SHAPE, rank, case.ranks, step=1) for rank in range(case.ranks)]
        cpu = torch.device("cpu")
        self._lanes = [
            open_lane("w", plan.compressor, plan.memory, plan.exchange, ctx, cpu)
            for ctx in contexts
        ]
        rng = torch.Generator().manual_seed(0)
        self._grads = [torch.randn(SHAPE, generator=rng) for _ in contexts]
        self._gradient_memory, self._message_memory = (
            GuardedMemory(MEMORY_BYTES),
            GuardedMemory(MEMORY_BYTES),
        )
        self._answers: list[Answer] = []
        programs = [self._program(rank, grad.clone()) for rank, grad in enumerate(self._grads)]
        Simulated(case.ranks).run([_record_answers(programs[0], self._answers), *programs[1:]])
        self.points = [
            InjectionPoint(
                call, rank, message.clone().view(torch.uint8), answer.kind in ("mean", "broadcast")
            )
            for call, answer in enumerate(self._answers)
            for rank, message in enumerate(answer.buffers)
        ]
        self._state_before = self._state_copies()

    def receive(self, point: InjectionPoint, message: Tensor, *, at_end: bool = True) -> Tensor:
        grad = self._gradient_memory.hold(self._grads[0].view(-1), at_end=at_end).view(SHAPE)
        program = self._program(0, grad)
        next(program)
        for number, (kind, buffers) in enumerate(self._answers):
            # The receiver may overwrite means, but not messages.
            answer = [b.clone() for b in buffers] if kind == "mean" else list(buffers)
            if number == point.call:
                held = self._message_memory.hold(message, at_end=at_end)
                answer[point.rank] = held.view(answer[point.rank].dtype)
            try:
                program.send(answer)
            except StopIteration:
                return grad
        raise AssertionError("the program continues after the last answer")

    def damage(self) -> str:
        pairs = zip(self._state_before, self._state_copies(), strict=True)
        if not all(same_bits(one, other) for one, other in pairs):
            return "the state of the lane has changed"
        received = [b.view(torch.uint8) for one in self._answers for b in one.buffers]
        if not all(same_bits(p.message, b) for p, b in zip(self.points, received, strict=True)):
            return "a message was overwritten"
        return ""

    def _state_copies(self) -> list[Tensor]:
        """Returns copies of the lane's state."""
        lane = self._lanes[0]
        return [t.clone() for t in (*lane.memory_state.values(), *lane.aggregator_state.values())]

    def _program(self, rank: int, grad: Tensor) -> CollectiveProgram[BucketResult]:
        return run_rounds([lane_rounds(grad, self._lanes[rank])])


def _record_answers(
    program: CollectiveProgram[BucketResult], answers: list[Answer]
) -> CollectiveProgram[BucketResult]:
    answer: Sequence[Tensor] | None = None
    while True:
        try:
            call = next(program) if answer is None else program.send(list(answer))
        except StopIteration as end:
            result: BucketResult = end.value
            return result
        answer = yield call
        answers.append(Answer(call.kind, [buffer.clone() for buffer in answer]))


def all_specs() -> list[str]:
    """Returns single methods in all their example settings, and pipelines of first examples."""
    singles = [
        format_spec(method(**example))
        for method in compressor_classes().values()
        for example in method.examples
    ]
    return [*singles, *_pipelines()]


def cases_of(spec: str) -> list[Case]:
    """Returns the decoder alone, for methods of one round, and every legal exchange."""
    exchanges = _exchanges()
    if "|" not in spec:
        exchanges += [
            f"gather:aggregate={name}" for name in get_args(Aggregation) if name != "mean"
        ]
    cases = [case for exchange in exchanges if _legal(case := Case(spec, exchange))]
    return [Case(spec, DECODE), *cases] if isinstance(parse(spec), OneRound) else cases


def open_target(case: Case) -> Target:
    if case.exchange != DECODE:
        return StepTarget(case)
    codec = parse(case.spec)
    assert isinstance(codec, OneRound)
    return DecoderTarget(codec)


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
