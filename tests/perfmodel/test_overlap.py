"""Simulated steps whose duration can be computed by hand."""

from dataclasses import dataclass
from math import inf
from typing import cast

import pytest
import torch

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.cost_model import LinkModel, Network
from gradwire.comm.meter import Meter
from gradwire.comm.mirror import CollectiveRecord
from gradwire.comm.pipeline import Pipeline
from gradwire.comm.process_group import PendingCollective, ProcessGroupComm, StagedCollective
from gradwire.perfmodel import overlap
from gradwire.perfmodel.overlap import StepWork, Task, predict_ranks, predict_step

# One second for every thousand bytes that one of two ranks sends.
NETWORK = Network(LinkModel(latency_s=0.0, rate_bits=8000))


def gather(seconds: int) -> tuple[CollectiveRecord, ...]:
    return (CollectiveRecord("gather", 1000 * seconds, 2, False),)


def step_s(work: StepWork, cores: float = inf, network: Network = NETWORK) -> float:
    return predict_step(work, network, cores).step_s


def test_one_bucket_is_the_sum_of_its_parts() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), tail_s=0.5)
    assert step_s(work) == pytest.approx(3 + 1 + 4 + 2 + 0.5)


def test_a_call_overlaps_with_computing() -> None:
    tasks = (Task(1.0, (0.0, 0.0), (gather(2),)), Task(10.0, (0.0, 0.0), (gather(2),)))
    assert step_s(StepWork(tasks, tail_s=0.0)) == pytest.approx(12)


def test_buckets_wait_for_the_communication_thread() -> None:
    tasks = (Task(1.0, (0.0, 0.0), (gather(5),)), Task(2.0, (0.0, 0.0), (gather(5),)))
    assert step_s(StepWork(tasks, tail_s=1.0)) == pytest.approx(1 + 5 + 5 + 1)


def messages(
    count: int, codec_s: tuple[float, ...], *seconds: int, pipelined: bool = True
) -> StepWork:
    """Returns equal messages of buckets that are full at the start."""
    task = Task(0.0, codec_s, tuple(map(gather, seconds)))
    return StepWork((task,) * count, tail_s=0.0, pipelined=pipelined)


def test_messages_are_encoded_and_decoded_while_others_are_on_the_wire() -> None:
    """All are encoded until 3, and sent from 1 to 13; the last is decoded until 15."""
    assert step_s(messages(3, (1.0, 2.0), 4)) == pytest.approx(15)
    assert step_s(messages(3, (1.0, 2.0), 4, pipelined=False)) == pytest.approx(3 * 7)


def test_rounds_of_several_messages_alternate() -> None:
    """a: sent 1 to 3, decoded and encoded again 3 to 6, sent 6 to 8.

    b: encoded until 2, sent 3 to 5, decoded and encoded again 6 to 9, sent 9 to 11. Then a is
    decoded until 10, and b from 11 to 12.
    """
    assert step_s(messages(2, (1.0, 3.0, 1.0), 2, 2)) == pytest.approx(12)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_step_is_bound_by_its_wire_or_by_its_codec(count: int) -> None:
    assert step_s(messages(count, (0.0, 0.0, 0.0), 2, 3)) == pytest.approx(5 * count)
    assert step_s(messages(count, (1.0, 4.0, 2.0), 0, 0)) == pytest.approx(7 * count)
    # Nearly: the first is encoded and the last is decoded while nothing is on the wire.
    assert step_s(messages(count, (0.5, 0.5), 2)) == pytest.approx(2 * count + 0.5 + 0.5)


def test_what_has_arrived_is_decoded_while_the_next_bucket_fills() -> None:
    """The first message is decoded from 3 to 6, the second from 13 to 16."""
    tasks = (Task(0.0, (1.0, 3.0), (gather(2),)), Task(10.0, (1.0, 3.0), (gather(2),)))
    assert step_s(StepWork(tasks, tail_s=0.0)) == pytest.approx(16)


def test_no_collective_starts_ahead_of_its_place() -> None:
    """The first round is decoded at once, and the second sent only after the next bucket's first.

    That is sent from 11 to 13, the second round from 13 to 18; other ranks may not be as early.
    """
    tasks = (
        Task(0.0, (1.0, 3.0, 0.0), (gather(2), gather(5))),
        Task(10.0, (1.0, 0.0), (gather(2),)),
    )
    assert step_s(StepWork(tasks, tail_s=0.0)) == pytest.approx(18)


def test_lengths_are_waited_for() -> None:
    """b is encoded at 2, when a's lengths have arrived; its own follow a's message, at 6."""
    call = (*gather(1), *gather(4))
    work = StepWork((Task(0.0, (1.0, 0.0), (call,)),) * 2, tail_s=0.0)
    assert step_s(work) == pytest.approx(1 + 1 + 4 + 1 + 4)


class LoggingComm:
    """Starts collectives that end at once, and notes what is encoded and started."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.events: list[tuple[int, int, bool]] = []

    def stage(self, collective: Collective) -> StagedCollective:
        return cast("StagedCollective", Staged(collective))

    def start(self, staged: "Staged") -> PendingCollective:
        number, place = staged.collective.buffers[0].tolist()
        self.events.append((int(number), int(place), True))
        return PendingCollective([], list)


@dataclass
class Staged:
    collective: Collective

    def is_ready(self) -> bool:
        return True


@pytest.mark.parametrize(
    "rounds", [(1, 1, 1), (2, 2, 2), (3, 1, 2, 1), (1, 4, 0, 2), (1,) * 7, (2, 1, 3, 2, 2, 1, 2)]
)
def test_the_order_is_that_of_the_pipeline(rounds: tuple[int, ...]) -> None:
    """Of its second step, when it knows how many rounds there are."""
    comm = LoggingComm()

    def program(number: int) -> CollectiveProgram[None]:
        for place in range(rounds[number]):
            comm.events.append((number, place, False))
            yield Collective("mean", [torch.tensor([number, place])])
        comm.events.append((number, rounds[number], False))

    pipeline = Pipeline(cast("ProcessGroupComm", comm))
    for _ in range(2):
        comm.events = []
        for number in range(len(rounds)):
            pipeline.add(program(number), lambda: None)
        pipeline.drain()
    tasks = (Task(0.0, (0.0,) * (count + 1), (gather(1),) * count) for count in rounds)
    assert [*overlap._order(StepWork(tuple(tasks), tail_s=0.0))] == comm.events


def test_without_a_core_of_its_own_the_communication_thread_slows_computing() -> None:
    """From second 1 on both threads share a core: 2 s of encoding and 3 s of computing."""
    tasks = (Task(1.0, (2.0,), ()), Task(4.0, (0.0,), ()))
    assert step_s(StepWork(tasks, tail_s=0.0)) == pytest.approx(4)
    assert step_s(StepWork(tasks, tail_s=0.0), cores=1) == pytest.approx(1 + 2 + 3)


def test_half_a_core_takes_twice_the_time_but_calls_do_not() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), tail_s=0.5)
    assert step_s(work, cores=0.5) == pytest.approx(2 * (3 + 1 + 2 + 0.5) + 4)


def test_a_call_ends_when_its_work_is_done() -> None:
    """A call takes 4 s on the wire, in 3 of which the CPU is busy; at half speed, in 6."""
    busy = Network(LinkModel(0.0, 8000, byte_work_s=0.75 / 1000))
    work = StepWork((Task(0.0, (0.0, 0.0), (gather(4),)),), tail_s=0.0)
    assert step_s(work, network=busy) == pytest.approx(4)
    assert step_s(work, cores=0.5, network=busy) == pytest.approx(6)


def test_times_of_the_parts_are_separate() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), tail_s=0.5)
    assert predict_step(work, NETWORK, cores=0.5)[1:] == pytest.approx((7.0, 2.0, 4.0, 4.0))


def test_a_model_without_buckets_only_computes() -> None:
    assert step_s(StepWork((), tail_s=2.0)) == pytest.approx(2)


def test_a_step_survives_to_list_and_from_list() -> None:
    own = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)), Task(5.0, (0.5,), ())), tail_s=0.5)
    other = StepWork((Task(2.0, (4.0, 1.0), (gather(4),)), Task(6.0, (0.1,), ())), tail_s=0.7)
    assert StepWork.from_list(own.to_list(), other) == own


def test_a_hop_is_work_before_it_is_time() -> None:
    """A wake-up takes 1 s, at half speed 2 s; the 3 s on the wire stay."""
    link = Network(LinkModel(latency_s=4.0, rate_bits=8e9, hop_work_s=1.0))
    work = StepWork(
        (Task(0.0, (0.0, 0.0), ((CollectiveRecord("gather", 0, 2, False),),)),), tail_s=0.0
    )
    assert step_s(work, network=link) == pytest.approx(4)
    assert step_s(work, cores=0.5, network=link) == pytest.approx(2 + 3)


def encodes(seconds: float) -> StepWork:
    """Returns a step of this encode time and a call of two seconds."""
    return StepWork((Task(0.0, (seconds, 0.0), (gather(2),)),), tail_s=0.0)


def test_a_call_begins_when_the_last_rank_reaches_it() -> None:
    ranks = [[encodes(1.0)], [encodes(3.0)], [encodes(2.0)]]
    assert predict_ranks(ranks, NETWORK).step_s == pytest.approx(3 + 2)


def test_ranks_whose_steps_vary_wait_for_each_other() -> None:
    """Each rank takes 1 or 3 seconds, so the slower of two takes 3 in three steps of four."""
    rank = [encodes(1.0), encodes(3.0)]
    met = predict_ranks([rank, rank], NETWORK, steps=400)
    assert met.step_s == pytest.approx(0.75 * 3 + 0.25 * 1 + 2, rel=0.05)
    assert met.encode_s == pytest.approx(2)


def test_ranks_use_the_cores_of_waiting_ranks() -> None:
    """Two ranks with half a core each share one: four seconds of work take four."""
    assert predict_ranks([[encodes(1.0)], [encodes(3.0)]], NETWORK, cores=0.5).step_s == (
        pytest.approx(4 + 2)
    )


def test_equal_ranks_take_the_step_of_one() -> None:
    tasks = (Task(1.0, (2.0, 0.5), (gather(2),)), Task(4.0, (0.3, 0.1), (gather(1),)))
    work = StepWork(tasks, tail_s=0.7)
    one = predict_step(work, NETWORK, cores=0.5)
    assert predict_ranks([[work]] * 3, NETWORK, cores=0.5) == pytest.approx(one)


def test_a_rank_that_is_early_begins_its_next_step() -> None:
    """The work after a call, 0 or 2 seconds, overlaps with the wait for the slower rank."""
    fast = StepWork((Task(1.0, (0.0, 0.0), (gather(2),)),), tail_s=2.0)
    slow = StepWork((Task(3.0, (0.0, 0.0), (gather(2),)),), tail_s=0.0)
    assert predict_ranks([[fast], [slow]], NETWORK, steps=10).step_s == pytest.approx(5, rel=0.05)
