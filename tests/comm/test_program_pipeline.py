"""The pipeline of programs: the order of collectives, overlap, and failures."""

from collections.abc import Callable
from random import Random
from typing import cast

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.comm.pipeline import MOST_UNDER_WAY, Pipeline
from gradwire.comm.process_group import PendingCollective, ProcessGroupComm, StagedCollective

EMPTY = torch.zeros(1, dtype=torch.uint8)


class FakePending:
    def __init__(self, buffers: list[Tensor], arrived: Callable[[], bool]) -> None:
        self._buffers, self.is_completed = buffers, arrived

    def wait(self) -> list[Tensor]:
        return self._buffers


class FakeStaged:
    """A message on its way from a GPU to the host, which is there at random."""

    def __init__(self, collective: Collective, is_ready: Callable[[], bool]) -> None:
        self.collective, self.is_ready = collective, is_ready


class FakeComm:
    """Notes the collectives that are started; messages are encoded and arrive at random."""

    def __init__(self, seed: int, *, arrives: bool = True) -> None:
        self.meter = Meter()
        self.started: list[int] = []
        self._random, self._arrives = Random(seed), arrives

    def stage(self, collective: Collective) -> StagedCollective:
        return cast(StagedCollective, FakeStaged(collective, self._at_random))

    def start(self, staged: StagedCollective) -> PendingCollective:
        self.started.append(staged.collective.root)
        arrived = self._at_random if self._arrives else lambda: False
        return cast(PendingCollective, FakePending(staged.collective.buffers, arrived))

    def _at_random(self) -> bool:
        return self._random.random() < 0.5


def pipeline_of(comm: FakeComm) -> Pipeline:
    return Pipeline(cast(ProcessGroupComm, comm))


def program(number: int, rounds: int, log: list[str]) -> CollectiveProgram[None]:
    """Marks each collective by 10 * number + round, and logs what it does."""
    for turn in range(rounds):
        log.append(f"encode {number}.{turn}")
        yield Collective("gather", [EMPTY], [1], root=10 * number + turn)
    log.append(f"decode {number}")


def run(rounds: list[int], seed: int) -> tuple[list[int], list[str], list[int]]:
    """Returns the collectives in the order of their starts, the log, and the ends."""
    random, comm = Random(seed), FakeComm(seed)
    pipeline = pipeline_of(comm)
    log: list[str] = []
    ends: list[int] = []
    for number, count in enumerate(rounds):
        pipeline.add(program(number, count, log), lambda number=number: ends.append(number))
        for _ in range(random.randrange(4)):
            pipeline.work_ahead()
    pipeline.drain()
    assert pipeline.is_idle()
    return comm.started, log, ends


def test_one_round_programs_keep_their_order_and_overlap() -> None:
    started, log, ends = run([1, 1, 1], seed=0)
    assert started == [0, 10, 20]
    assert ends == [0, 1, 2]
    comm, log = FakeComm(0), []
    pipeline = pipeline_of(comm)
    for number in range(3):
        pipeline.add(program(number, 1, log), lambda: None)
    # A bucket is encoded and on the wire before the one before it is decoded.
    assert log == ["encode 0.0", "encode 1.0", "decode 0", "encode 2.0", "decode 1"]


def test_later_rounds_follow_the_first_round_of_the_next_program() -> None:
    assert run([2, 2, 2], seed=0)[0] == [0, 10, 1, 20, 11, 21]
    assert run([3, 1, 2], seed=0)[0] == [0, 10, 1, 20, 2, 21]
    assert run([0, 2, 0], seed=0)[0] == [10, 11]


@pytest.mark.parametrize("rounds", [[1, 1, 1, 1], [2, 3, 1, 2], [4, 1, 0, 3, 2], [5]])
def test_the_order_does_not_depend_on_when_messages_arrive(rounds: list[int]) -> None:
    orders = {tuple(run(rounds, seed)[0]) for seed in range(50)}
    assert len(orders) == 1
    [order] = orders
    expected = {10 * number + turn for number, count in enumerate(rounds) for turn in range(count)}
    assert set(order) == expected
    assert len(order) == len(expected)


@pytest.mark.parametrize(
    "steps",
    [
        [[2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2]],
        [[1, 1, 2, 3], [2, 1, 1, 4, 1]],
        [[2, 3, 1, 2], [1, 3, 3], [2, 2, 2, 2]],
    ],
)
def test_the_order_depends_on_the_rounds_of_the_last_step_only(steps: list[list[int]]) -> None:
    """Numbers of rounds that change, as after a switch, give other orders, but no rank differs."""

    def order_of(seed: int) -> tuple[int, ...]:
        random, comm, log = Random(seed), FakeComm(seed), list[str]()
        pipeline = pipeline_of(comm)
        for rounds in steps:
            for number, count in enumerate(rounds):
                pipeline.add(program(number, count, log), lambda: None)
                for _ in range(random.randrange(4)):
                    pipeline.work_ahead()
            pipeline.drain()
        assert len(comm.started) == sum(map(sum, steps))
        return tuple(comm.started)

    assert len({order_of(seed) for seed in range(50)}) == 1


def test_a_program_in_its_last_round_holds_up_no_other() -> None:
    comm, log = FakeComm(0, arrives=False), list[str]()
    pipeline = pipeline_of(comm)
    for _ in range(2):
        log.clear()
        for number in range(MOST_UNDER_WAY + 1):
            pipeline.add(program(number, 1, log), lambda: None)
        pipeline.drain()
    encoded = [f"encode {number}.0" for number in range(MOST_UNDER_WAY + 1)]
    # In the second step only the limit of messages on the wire makes it wait.
    assert log[: len(encoded)] == encoded
    assert log[len(encoded)] == "decode 0"


def test_an_error_leaves_programs_that_can_be_abandoned() -> None:
    def failing() -> CollectiveProgram[None]:
        yield Collective("gather", [EMPTY], [1])
        raise ValueError("cannot decode")

    closed: list[bool] = []

    def waiting() -> CollectiveProgram[None]:
        try:
            yield Collective("gather", [EMPTY], [1])
        finally:
            closed.append(True)

    pipeline = pipeline_of(FakeComm(0))
    pipeline.add(failing(), lambda: None)
    with pytest.raises(ValueError, match="cannot decode"):
        pipeline.add(waiting(), lambda: None)
    pipeline.abandon()
    assert closed == [True]
    assert pipeline.is_idle()
