"""Steps whose end can be told by hand."""

from math import inf

import pytest

from gradwire.comm.cost_model import LinkModel, Network
from gradwire.comm.mirror import Said
from gradwire.perfmodel.overlap import StepWork, Task, predict, predict_all

# One second for every thousand bytes that a rank of two passes on.
NETWORK = Network(LinkModel(latency_s=0.0, rate_bits=8000))


def gather(seconds: int) -> tuple[Said, ...]:
    return (Said("gather", 1000 * seconds, 2, False),)


def step_s(work: StepWork, cores: float = inf, network: Network = NETWORK) -> float:
    return predict(work, network, cores).step_s


def test_one_bucket_is_the_sum_of_its_parts() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert step_s(work) == pytest.approx(3 + 1 + 4 + 2 + 0.5)


def test_a_call_hides_behind_computing() -> None:
    errands = (Task(1.0, (0.0, 0.0), (gather(2),)), Task(10.0, (0.0, 0.0), (gather(2),)))
    assert step_s(StepWork(errands, rest_s=0.0)) == pytest.approx(12)


def test_buckets_wait_for_the_courier() -> None:
    errands = (Task(1.0, (0.0, 0.0), (gather(5),)), Task(2.0, (0.0, 0.0), (gather(5),)))
    assert step_s(StepWork(errands, rest_s=1.0)) == pytest.approx(1 + 5 + 5 + 1)


def test_without_a_core_of_its_own_a_courier_slows_computing_down() -> None:
    """From second 1 on both threads share a core: 2 s of work and 3 s of the rest."""
    errands = (Task(1.0, (2.0,), ()), Task(4.0, (0.0,), ()))
    assert step_s(StepWork(errands, rest_s=0.0)) == pytest.approx(4)
    assert step_s(StepWork(errands, rest_s=0.0), cores=1) == pytest.approx(1 + 2 + 3)


def test_half_a_core_takes_twice_the_time_but_calls_do_not() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert step_s(work, cores=0.5) == pytest.approx(2 * (3 + 1 + 2 + 0.5) + 4)


def test_a_call_ends_when_its_work_is_done() -> None:
    """Four seconds on the wire, of which the processor is busy for three; at half speed, six."""
    busy = Network(LinkModel(0.0, 8000, byte_work_s=0.75 / 1000))
    work = StepWork((Task(0.0, (0.0, 0.0), (gather(4),)),), rest_s=0.0)
    assert step_s(work, network=busy) == pytest.approx(4)
    assert step_s(work, cores=0.5, network=busy) == pytest.approx(6)


def test_parts_are_told_apart() -> None:
    work = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)),), rest_s=0.5)
    assert predict(work, NETWORK, cores=0.5)[1:] == pytest.approx((7.0, 2.0, 4.0, 4.0))


def test_a_model_without_buckets_only_computes() -> None:
    assert step_s(StepWork((), rest_s=2.0)) == pytest.approx(2)


def test_a_step_goes_out_as_numbers_and_comes_back() -> None:
    own = StepWork((Task(3.0, (1.0, 2.0), (gather(4),)), Task(5.0, (0.5,), ())), rest_s=0.5)
    other = StepWork((Task(2.0, (4.0, 1.0), (gather(4),)), Task(6.0, (0.1,), ())), rest_s=0.7)
    assert StepWork.of(own.numbers(), other) == own


def test_a_hop_is_work_before_it_is_time() -> None:
    """One second of it to wake up, at half speed two; the three on the wire stay."""
    link = Network(LinkModel(latency_s=4.0, rate_bits=8e9, hop_work_s=1.0))
    work = StepWork((Task(0.0, (0.0, 0.0), ((Said("gather", 0, 2, False),),)),), rest_s=0.0)
    assert step_s(work, network=link) == pytest.approx(4)
    assert step_s(work, cores=0.5, network=link) == pytest.approx(2 + 3)


def encodes(seconds: float) -> StepWork:
    """A step that is only this work, and then a call of two seconds."""
    return StepWork((Task(0.0, (seconds, 0.0), (gather(2),)),), rest_s=0.0)


def test_a_call_begins_when_the_last_rank_has_come() -> None:
    ranks = [[encodes(1.0)], [encodes(3.0)], [encodes(2.0)]]
    assert predict_all(ranks, NETWORK).step_s == pytest.approx(3 + 2)


def test_ranks_that_vary_wait_longer_than_the_usual_step_of_any() -> None:
    """Each takes 1 or 3 seconds, so of two the slower takes 3 in three steps of four."""
    rank = [encodes(1.0), encodes(3.0)]
    met = predict_all([rank, rank], NETWORK, steps=400)
    assert met.step_s == pytest.approx(0.75 * 3 + 0.25 * 1 + 2, rel=0.05)
    assert met.encode_s == pytest.approx(2)


def test_what_a_rank_that_waits_does_not_use_others_do() -> None:
    """Half a core each is one for both: all four seconds of work take four."""
    assert predict_all([[encodes(1.0)], [encodes(3.0)]], NETWORK, cores=0.5).step_s == (
        pytest.approx(4 + 2)
    )


def test_equal_ranks_take_the_step_of_one() -> None:
    errands = (Task(1.0, (2.0, 0.5), (gather(2),)), Task(4.0, (0.3, 0.1), (gather(1),)))
    work = StepWork(errands, rest_s=0.7)
    one = predict(work, NETWORK, cores=0.5)
    assert predict_all([[work]] * 3, NETWORK, cores=0.5) == pytest.approx(one)


def test_a_rank_that_is_early_begins_its_next_step() -> None:
    """What follows a call, 0 or 2 seconds, is made up for by who comes late to the next one."""
    fast = StepWork((Task(1.0, (0.0, 0.0), (gather(2),)),), rest_s=2.0)
    slow = StepWork((Task(3.0, (0.0, 0.0), (gather(2),)),), rest_s=0.0)
    assert predict_all([[fast], [slow]], NETWORK, steps=10).step_s == pytest.approx(5, rel=0.05)
