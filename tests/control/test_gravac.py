"""GraVAC's decisions, step by step as computed by hand."""

import math

import pytest

import gradwire
from gradwire.control.base import StepReport
from gradwire.control.gravac import Explorer, GraVAC, Policy, gain, noted, saturated
from gradwire.control.two_level import Levels


def pilot(size: int = 4, **settings: object) -> Explorer:
    usual: dict[str, object] = {"alpha": 1.0, "window": 3, "epsilon": 0.5, "gain_norm": "l2sq"}
    rule = GraVAC(**{**usual, **settings})  # type: ignore[arg-type]
    made = rule.pilot(gradwire.parse("topk:ratio=0.1"), ["w"], size)
    assert isinstance(made, Explorer)
    return made


def feed(
    led: Explorer, floor: float, candidate: float, last_s: float | None = None, ref: float = 1.0
) -> str:
    """A step in which the levels keep so much; what is sent next."""
    led.step(StepReport(led.known.seen + 1, [(["w"], [ref, floor, candidate, ref])], last_s))
    return led.explain()["setting"]  # type: ignore[return-value]


def test_the_published_lists_of_candidates() -> None:
    assert GraVAC(low=10, high=1000).factors() == [10, 20, 40, 160, 1000]
    geometric = GraVAC(low=10, high=2000, policy="geometric")
    assert geometric.factors() == [10, 20, 40, 80, 160, 320, 640, 1280, 2000]
    assert GraVAC(low=1.5, high=48, policy="geometric").factors() == [1.5, 3, 6, 12, 24, 48]


@pytest.mark.parametrize("policy", ["exponential", "geometric"])
@pytest.mark.parametrize("low", [1.0000001, 10.0, 10])
def test_factors_end_where_floats_do(low: float, policy: Policy) -> None:
    factors = GraVAC(low=low, high=1e308, policy=policy).factors()
    assert factors[-1] == 1e308
    assert factors == sorted(set(factors))


def test_the_gate_takes_the_candidate_then_the_floor_then_all() -> None:
    led = pilot(window=100)
    assert led.explain()["setting"] == "dense"
    assert feed(led, 0.9, 0.6) == "20x"
    assert feed(led, 0.9, 0.4) == "10x"
    assert feed(led, 0.4, 0.3) == "dense"
    assert feed(led, 0.5, 0.3) == "10x"
    assert feed(led, 0.9, 0.5) == "20x"
    steps = [(d.step, d.setting) for d in led.log.decisions]
    assert steps == [(0, "dense"), (1, "20x"), (2, "10x"), (3, "dense"), (4, "10x"), (5, "20x")]
    assert "gain 0.9 at 10x, 0.4 at 20x, epsilon 0.5" in led.log.decisions[2].reason


def test_gains_are_smoothed_with_the_number_of_ranks_over_a_hundred() -> None:
    led = pilot(size=32, alpha=0.0, window=100)
    feed(led, 1.0, 0.5)
    feed(led, 0.5, 0.25)
    assert led.known.floor_gain == pytest.approx(0.32 * 0.5 + 0.68 * 1.0)
    assert led.known.candidate_gain == pytest.approx(0.32 * 0.25 + 0.68 * 0.5)
    assert pilot(size=400, alpha=0.0)._alpha == 1


def test_a_window_brings_the_next_candidate_and_may_raise_the_floor() -> None:
    led = pilot()
    for _ in range(2):
        feed(led, 0.9, 0.6)
    # 0.9 and 0.6 are far apart: the floor stays, and the new candidate has to show itself first.
    assert feed(led, 0.9, 0.6) == "10x"
    assert (led.explain()["floor"], led.explain()["candidate"]) == (10, 40)
    assert led.known.candidate_gain is None
    for _ in range(2):
        assert feed(led, 0.9, 0.895) == "40x"
    # Within 1 %: the floor becomes the candidate just tried, and the list goes on behind it.
    assert feed(led, 0.9, 0.895) == "40x"
    assert (led.explain()["floor"], led.explain()["candidate"]) == (40, 160)
    assert led.known.floor_gain == pytest.approx(0.895)
    assert led.factor() == 40


def test_the_last_candidate_stays_and_may_become_the_floor() -> None:
    led = pilot(window=1, low=10, high=20)
    assert led.explain()["candidate"] == 20
    feed(led, 0.9, 0.9)
    assert (led.explain()["floor"], led.explain()["candidate"]) == (20, 20)
    order = led.order("w").compressor
    assert isinstance(order, Levels)
    assert order.alone
    assert feed(led, 0.3, 0.3) == "dense"
    assert feed(led, 0.8, 0.8) == "20x"
    # Windows that bring nothing new are no decisions, and leave room for those that are.
    decided = len(led.log.decisions)
    for _ in range(10):
        feed(led, 0.8, 0.8)
    assert len(led.log.decisions) == decided


def test_throughput_is_that_of_the_step_before_times_its_gain() -> None:
    led = pilot(window=100)
    feed(led, 0.9, 0.6)
    feed(led, 0.9, 0.4, last_s=2.0)
    feed(led, 0.9, 0.4, last_s=1.0)
    feed(led, 0.9, 0.4, last_s=0.5)
    # Dense in 2 s; 20x at gain 0.4 in 1 s; 10x at gain 0.9 in 0.5 s.
    assert led.explain()["throughput"] == pytest.approx({1: 2.0, 20: 4 * 0.4, 10: 8 * 0.9})


def test_throughput_that_saturates_settles_on_the_lower_factor() -> None:
    led = pilot(window=2, low=10, high=80, policy="geometric", omega=0.1)
    feed(led, 0.8, 0.78)  # dense, 20x next
    feed(led, 0.8, 0.5, last_s=1.0)  # sent 20x; the window ends: next candidate is 40x
    assert led.explain()["candidate"] == 40
    assert led.factor() == 10
    feed(led, 0.8, 0.49, last_s=1.0)  # 20x made 4 * 0.5; now 10x was sent
    assert not led.known.frozen
    feed(led, 0.8, 0.49, last_s=1.6)  # 10x made 2.5 * 0.8 = 2.0, as much as 20x
    assert led.known.frozen
    assert (led.explain()["floor"], led.explain()["candidate"]) == (10, 10)
    assert "throughput saturates: settled on 10x" in led.log.decisions[-1].reason
    assert feed(led, 0.8, 0.8) == "10x"
    # Nothing is tried any more, however many windows pass.
    for _ in range(5):
        feed(led, 0.8, 0.8)
    assert (led.explain()["floor"], led.explain()["candidate"]) == (10, 10)


def test_a_settled_factor_above_the_floor_shows_itself_first() -> None:
    led = pilot(window=1, low=10, high=80, policy="geometric")
    led.known.candidate = 2
    led.known.throughput = {1.0: [5.0], 10.0: [1.0], 20.0: [2.001], 40.0: [2.0]}
    assert feed(led, 0.9, 0.6) == "10x"
    assert led.known.frozen
    assert (led.explain()["floor"], led.explain()["candidate"]) == (10, 20)
    assert feed(led, 0.9, 0.7) == "20x"


def test_the_gain_of_a_settled_factor_is_its_own() -> None:
    led = pilot(window=1, low=10, high=80, policy="geometric", omega=0.1)
    led.known.throughput = {10.0: [2.0], 20.0: [2.0]}
    assert feed(led, 0.9, 0.85) == "10x"
    reason = led.log.decisions[-1].reason
    assert "the floor rises to 20x" in reason
    assert "settled on 10x; gain 0.9 at 10x, 0.9 at 10x" in reason


@pytest.mark.parametrize(("floor", "sent"), [(0.85, "10x"), (0.4, "dense")])
def test_nor_is_it_told_of_one_that_was_left_long_ago(floor: float, sent: str) -> None:
    led = pilot(window=1, low=10, high=80, policy="geometric", omega=0.1)
    led.known.floor, led.known.candidate = 1, 2
    led.known.throughput = {10.0: [2.0], 40.0: [2.0]}
    # It keeps at least what the floor beyond it keeps.
    assert feed(led, floor, 0.2) == sent
    assert "settled on 10x; gain unknown at 10x" in led.log.decisions[-1].reason
    assert feed(led, 0.97, 0.97) == "10x"
    assert led.known.candidate_gain == led.known.floor_gain == 0.97


def test_the_dense_entry_does_not_count_as_saturation() -> None:
    assert saturated({1.0: 10.0, 20.0: 9.99}, 0.01) is None
    assert saturated({1.0: 10.0, 20.0: 9.99, 10.0: 9.98}, 0.01) == 10
    assert saturated({10.0: 9.0, 20.0: 9.99}, 0.01) is None
    assert saturated({1280.0: 1029.9, 2000.0: 1035.4}, 0.01) == 1280


def test_a_settled_candidate_is_computed_alone_but_the_gate_stays() -> None:
    led = pilot(window=100)
    feed(led, 0.9, 0.6)
    led.known.frozen = True
    order = led.order("w").compressor
    assert isinstance(order, Levels)
    assert order.alone
    # The floor is not measured meanwhile: its gain stays as it was last seen.
    feed(led, 0.2, 0.6)
    assert led.known.floor_gain == 0.9
    assert feed(led, 0.2, 0.2) == "10x"
    order = led.order("w").compressor
    assert isinstance(order, Levels)
    assert not order.alone
    assert feed(led, 0.2, 0.2) == "dense"
    assert led.order("w").dense
    assert feed(led, 0.9, 0.8) == "20x"


def test_one_outlier_does_not_decide_with_a_median() -> None:
    values: list[float] = []
    for value in (1.0, 1.1, 900.0):
        values = noted(values, value, 0.5, "median")
    led = pilot(window=100, throughput="median")
    led.known.throughput[20.0] = values
    assert led.explain()["throughput"] == {20.0: 1.1}


@pytest.mark.parametrize(("how", "left"), [("ewma", 0.95 * 32 + 0.05 * 3.6), ("median", 32)])
def test_one_odd_step_does_not_settle_the_search(rounds_like: str, left: float) -> None:
    """Had its throughput alone counted, 20x would seem as good as 10x when the window ends."""
    led = pilot(window=30, alpha=0.05, throughput=rounds_like, low=10, high=40, policy="geometric")
    led.known.throughput[10.0] = [3.6]
    for _ in range(29):
        feed(led, 0.9, 0.8, last_s=0.1)
    feed(led, 0.9, 0.8, last_s=4 * 0.8 / 3.6)
    assert led.explain()["candidate"] == 40
    assert not led.known.frozen
    assert led.explain()["throughput"] == pytest.approx({1: 40, 10: 3.6, 20: left})


@pytest.mark.parametrize("ref", [0.0, math.nan, math.inf])
def test_steps_that_say_nothing_move_nothing(ref: float) -> None:
    led = pilot()
    feed(led, 0.9, 0.6)
    feed(led, 0.9, 0.6, last_s=1.0)
    before = led.save()
    assert feed(led, 0.1, 0.1, last_s=9.0, ref=ref) == "20x"
    # Only whose time comes next is forgotten.
    assert led.save() == {**before, "last_factor": None}
    led.skip()
    assert led.save() == {**before, "last_factor": None}


def test_definitions_of_the_gain() -> None:
    assert gain(0.0, 0.0, "l2sq") == 1
    assert gain(1.0, 4.0, "l2sq") == 0.25
    assert gain(1.0, 4.0, "l2") == 0.5
    assert gain(3.0, 4.0, "layer_l2") == 0.75
