"""A non-finite word in a received message never becomes state, and ranks stay in step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import pytest
import torch
from catalogue import legal_cases
from torch import Tensor

from gradwire.comm.base import CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.engine import step as engine_step
from gradwire.engine.batching import Answers, Batch, batches
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.errors import PeerError, WireError
from gradwire.memory.residual import Residual
from gradwire.spec import format_spec, memory_classes, parse, parse_exchange
from gradwire.testing.case import Case
from gradwire.types import Parts, Request

SHAPES = {"w": (40, 33), "v": (33, 40), "b": (7,)}
BAD = (float("nan"), float("inf"), float("-inf"))


@dataclass
class Fault:
    """Replaces a float of each lane's answer in one round by a bad value, on some ranks."""

    round: int
    ranks: Sequence[int]
    bad: float
    sender: int = 0
    hits: int = 0
    rounds: int = 0
    """Rounds of a program so far: after a step, how many it had."""
    _rank: int = 0
    _seen: dict[int, int] = field(default_factory=dict)

    def programs(
        self, programs: Sequence[CollectiveProgram[None]]
    ) -> list[CollectiveProgram[None]]:
        return [self._program(rank, program) for rank, program in enumerate(programs)]

    def _program(self, rank: int, program: CollectiveProgram[None]) -> CollectiveProgram[None]:
        """Runs a rank's program, and notes which rank is running."""
        self._rank = rank
        try:
            collective = next(program)
            while True:
                received = yield collective
                self._rank = rank
                collective = program.send(received)
        except StopIteration:
            return

    def batches(self, requests: Mapping[int, Request]) -> Iterator[Batch]:
        rank, number = self._rank, self._seen.get(self._rank, 0)
        self._seen[rank] = number + 1
        self.rounds = max(self.rounds, number + 1)
        is_hit = number == self.round and rank in self.ranks
        for batch in batches(requests):
            yield batch._replace(unbatch=self._corrupted(batch)) if is_hit else batch

    def _corrupted(self, batch: Batch):
        def unbatch(received: list[Tensor]) -> Answers:
            answers = batch.unbatch(received)
            for lane in answers:
                if lane >= 0:
                    messages = list(answers[lane])
                    sender = min(self.sender, len(messages) - 1)
                    messages[sender] = self._with_bad_word(messages[sender])
                    answers[lane] = messages
            return answers

        return unbatch

    def _with_bad_word(self, parts: Parts) -> Parts:
        for number, part in enumerate(parts):
            if part.is_floating_point() and part.numel():
                self.hits += 1
                changed = part.clone()
                changed.view(-1)[-1] = self.bad
                return (*parts[:number], changed, *parts[number + 1 :])
        return parts


class Outcome(NamedTuple):
    """The gradients of each rank after a step, and the ranks that ended with an error."""

    outs: list[list[Tensor]]
    refused: set[int]


class Workers:
    """All ranks of a case, each with an engine whose means are all decoded."""

    def __init__(self, case: Case, nan_policy: str = "propagate") -> None:
        tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        plan = make_plan(case.compressor, case.memory, case.exchange, tensors.values(), case.ranks)
        self.size = case.ranks
        self.engines = [
            Engine(plan, tensors, rank, self.size, 0, nan_policy)  # type: ignore[arg-type]
            for rank in range(self.size)
        ]

    def step(
        self, monkeypatch: pytest.MonkeyPatch, grads: Sequence[dict[str, Tensor]], fault: Fault
    ) -> Outcome:
        """Runs a step with a fault."""
        outs = [[grad.clone() for grad in own.values()] for own in grads]
        pairs = zip(self.engines, outs, strict=True)
        programs = [engine.bucket_program([*SHAPES], own) for engine, own in pairs]
        with monkeypatch.context() as patch:
            patch.setattr(engine_step, "batches", fault.batches)
            try:
                Simulated(self.size).run(fault.programs(programs))
            except (PeerError, WireError):
                return Outcome(outs, set(range(self.size)))
        refused = set()
        for rank, engine in enumerate(self.engines):
            engine.end_step()
            try:
                engine.commit_step()
            except WireError:
                refused.add(rank)
        return Outcome(outs, refused)

    def clean_step(self, monkeypatch: pytest.MonkeyPatch, number: int) -> list[Tensor]:
        """Runs a step without a fault; returns the means, on which all ranks must agree."""
        grads = gradients(number, self.size)
        outs, refused = self.step(monkeypatch, grads, Fault(-1, (), 0.0))
        assert not refused
        assert all(equal(outs[0], own) for own in outs)
        assert all(mean.isfinite().all() for mean in outs[0])
        return outs[0]

    def states(self) -> list[list[Tensor]]:
        """Returns copies of all tensors that each rank keeps."""
        return [
            [
                tensor.clone()
                for lane in engine.lanes.values()
                for tensor in (*lane.memory_state.values(), *lane.aggregator_state.values())
            ]
            for engine in self.engines
        ]

    def keeps_finite_state(self) -> bool:
        return all(tensor.isfinite().all() for state in self.states() for tensor in state)

    def skipped(self) -> int:
        """Returns the number of skipped steps, on which all ranks must agree."""
        [skipped] = {engine.skipped.total for engine in self.engines}
        [_] = {engine.steps() for engine in self.engines}
        return skipped


def gradients(step: int, ranks: int, scale: float = 1.0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def cases() -> list[Case]:
    """Returns every method with every memory in its usual setting, and every exchange."""
    usual = {format_spec(cls(**cls.examples[0])) for cls in memory_classes().values()}
    return [case for case in legal_cases() if format_spec(case.memory) in usual]


def check_fault(case: Case, patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Compares ranks that had the fault in their second step with ranks that had no such step."""
    workers, healthy = Workers(case), Workers(case)
    workers.clean_step(patch, 0)
    healthy.clean_step(patch, 0)
    before = workers.states()
    _, refused = workers.step(patch, gradients(1, case.ranks), fault)
    if not fault.hits:
        return
    assert workers.keeps_finite_state()
    unchanged = {rank for rank, own in enumerate(workers.states()) if equal(before[rank], own)}
    if refused:
        # No later message could inform the others: a node sends one message and one flag for all
        # of its ranks, who cannot send a share of it each if one of them encodes other values.
        is_last = fault.round == fault.rounds - 1
        assert is_last or case.exchange.node is not None
        assert refused >= set(fault.ranks) if is_last else refused
        assert unchanged >= refused
        return
    if workers.engines[0].is_plain_mean():
        # Gradients become non-finite, as with plain DDP, and there is no state.
        healthy.clean_step(patch, 1)
    else:
        assert workers.skipped() == 1
        assert len(unchanged) == case.ranks
    assert equal(workers.clean_step(patch, 2), healthy.clean_step(patch, 2))
    assert workers.keeps_finite_state()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_received_word_that_is_not_finite_never_becomes_state(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Fault(-1, (), 0.0)
    Workers(case).step(monkeypatch, gradients(0, case.ranks), probe)
    hits = 0
    targets = product(range(probe.rounds), [[1], range(case.ranks)])
    for number, (place, ranks) in enumerate(targets):
        fault = Fault(place, ranks, BAD[number % len(BAD)], sender=number % 2)
        check_fault(case, monkeypatch, fault)
        hits += fault.hits
    assert hits


@pytest.mark.parametrize("case", cases(), ids=str)
def test_finite_gradients_whose_sums_overflow_never_become_state(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(case)
    workers.clean_step(monkeypatch, 0)
    # Signs differ between entries, not between ranks and steps: sums grow.
    largest = 0.99 * torch.finfo(torch.float32).max
    huge = {name: grad.sign() * largest for name, grad in gradients(9, 1)[0].items()}
    for _ in range(3):
        outs, refused = workers.step(monkeypatch, [huge] * case.ranks, Fault(-1, (), 0.0))
        assert not refused
        workers.skipped()
        assert workers.keeps_finite_state()
        for own in outs:
            assert all(
                torch.equal(a, b) for a, b in zip(outs[0], own, strict=True) if a.isfinite().all()
            )


@pytest.mark.parametrize("aggregation", ["median", "trimmed", "diameter"])
def test_a_robust_aggregation_tolerates_a_non_finite_message(
    aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag of its sender says that it is finite: a faulty rank cannot stop the others."""
    exchange = parse_exchange(f"gather:aggregate={aggregation}")
    case = Case(parse("int4"), Residual(), exchange)
    for ranks in ([1], range(case.ranks)):
        workers = Workers(case)
        workers.clean_step(monkeypatch, 0)
        fault = Fault(0, ranks, float("nan"))
        outs, refused = workers.step(monkeypatch, gradients(1, case.ranks), fault)
        assert fault.hits
        assert not refused
        assert workers.skipped() == 0
        assert all(mean.isfinite().all() for own in outs for mean in own)
        assert workers.keeps_finite_state()
