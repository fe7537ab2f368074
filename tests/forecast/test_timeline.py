"""Steps whose end can be told by hand."""

from math import inf

import pytest

from laconic.comm.ghost import Said
from laconic.forecast.timeline import Errand, StepWork, predict
from laconic.network.model import LinkModel, Network

# One second for every thousand bytes that a rank of two passes on.
NETWORK = Network(LinkModel(latency_s=0.0, rate_bits=8000))


def gather(seconds: int) -> tuple[Said, ...]:
    return (Said("gather", 1000 * seconds, 2, False),)


def step_s(work: StepWork, cores: float = inf, network: Network = NETWORK) -> float:
    return predict(work, network, cores).step_s


def test_one_bucket_is_the_sum_of_its_parts() -> None:
    work = StepWork((Errand(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert step_s(work) == pytest.approx(3 + 1 + 4 + 2 + 0.5)


def test_a_call_hides_behind_computing() -> None:
    errands = (Errand(1.0, (0.0, 0.0), (gather(2),)), Errand(10.0, (0.0, 0.0), (gather(2),)))
    assert step_s(StepWork(errands, rest_s=0.0)) == pytest.approx(12)


def test_buckets_wait_for_the_courier() -> None:
    errands = (Errand(1.0, (0.0, 0.0), (gather(5),)), Errand(2.0, (0.0, 0.0), (gather(5),)))
    assert step_s(StepWork(errands, rest_s=1.0)) == pytest.approx(1 + 5 + 5 + 1)


def test_without_a_core_of_its_own_a_courier_slows_computing_down() -> None:
    """From second 1 on both threads share a core: 2 s of work and 3 s of the rest."""
    errands = (Errand(1.0, (2.0,), ()), Errand(4.0, (0.0,), ()))
    assert step_s(StepWork(errands, rest_s=0.0)) == pytest.approx(4)
    assert step_s(StepWork(errands, rest_s=0.0), cores=1) == pytest.approx(1 + 2 + 3)


def test_half_a_core_takes_twice_the_time_but_calls_do_not() -> None:
    work = StepWork((Errand(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert step_s(work, cores=0.5) == pytest.approx(2 * (3 + 1 + 2 + 0.5) + 4)


def test_a_call_ends_when_its_work_is_done() -> None:
    """Four seconds on the wire, of which the processor is busy for three; at half speed, six."""
    busy = Network(LinkModel(0.0, 8000, byte_work_s=0.75 / 1000))
    work = StepWork((Errand(0.0, (0.0, 0.0), (gather(4),)),), rest_s=0.0)
    assert step_s(work, network=busy) == pytest.approx(4)
    assert step_s(work, cores=0.5, network=busy) == pytest.approx(6)


def test_parts_are_told_apart() -> None:
    work = StepWork((Errand(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert predict(work, NETWORK, cores=0.5)[1:] == pytest.approx((7.0, 2.0, 4.0, 4.0))


def test_a_model_without_buckets_only_computes() -> None:
    assert step_s(StepWork((), rest_s=2.0)) == pytest.approx(2)


def test_the_work_of_several_ranks_becomes_one() -> None:
    """Number by number the largest, with the calls that all of them make."""
    own = StepWork((Errand(3.0, (1.0, 2.0), (gather(4),)), Errand(5.0, (0.5,), ())), rest_s=0.5)
    other = StepWork((Errand(2.0, (4.0, 1.0), (gather(4),)), Errand(6.0, (0.1,), ())), rest_s=0.7)
    assert StepWork.of(own.numbers(), other) == own
    pairs = zip(own.numbers(), other.numbers(), strict=True)
    most = StepWork.of([max(pair) for pair in pairs], own)
    errands = (Errand(3.0, (4.0, 2.0), (gather(4),)), Errand(6.0, (0.5,), ()))
    assert most == StepWork(errands, rest_s=0.7)
