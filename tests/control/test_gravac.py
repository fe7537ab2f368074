"""GraVAC's decisions, step by step as computed by hand."""

import math

import pytest

import gradwire
from gradwire.control.base import StepReport
from gradwire.control.gravac import (
    GraVAC,
    GraVACState,
    Policy,
    add_throughput,
    gain,
    saturated_factor,
)
from gradwire.control.two_level import TwoLevelSparsifier


def make_state(world_size: int = 4, **settings: object) -> GraVACState:
    usual: dict[str, object] = {"alpha": 1.0, "window": 3, "epsilon": 0.5, "gain_norm": "l2sq"}
    controller = GraVAC(**{**usual, **settings})  # type: ignore[arg-type]
    state = controller.create_state(gradwire.parse("topk:ratio=0.1"), ["w"], world_size)
    assert isinstance(state, GraVACState)
    return state


def feed(
    state: GraVACState,
    floor: float,
    candidate: float,
    last_s: float | None = None,
    ref: float = 1.0,
) -> str:
    """Ends a step with these energies; returns the next setting."""
    state.end_step(
        StepReport(state.search.measured_steps + 1, [(["w"], [ref, floor, candidate, ref])], last_s)
    )
    return state.explain()["setting"]  # type: ignore[return-value]


def test_the_published_lists_of_factors() -> None:
    assert GraVAC(low=10, high=1000).factors() == [10, 20, 40, 160, 1000]
    geometric = GraVAC(low=10, high=2000, policy="geometric")
    assert geometric.factors() == [10, 20, 40, 80, 160, 320, 640, 1280, 2000]
    assert GraVAC(low=1.5, high=48, policy="geometric").factors() == [1.5, 3, 6, 12, 24, 48]


@pytest.mark.parametrize("policy", ["exponential", "geometric"])
@pytest.mark.parametrize("low", [1.0000001, 10.0, 10])
def test_factors_stay_within_the_range_of_floats(low: float, policy: Policy) -> None:
    factors = GraVAC(low=low, high=1e308, policy=policy).factors()
    assert factors[-1] == 1e308
    assert factors == sorted(set(factors))


def test_the_gate_sends_the_candidate_or_the_floor_or_dense() -> None:
    state = make_state(window=100)
    assert state.explain()["setting"] == "dense"
    assert feed(state, 0.9, 0.6) == "20x"
    assert feed(state, 0.9, 0.4) == "10x"
    assert feed(state, 0.4, 0.3) == "dense"
    assert feed(state, 0.5, 0.3) == "10x"
    assert feed(state, 0.9, 0.5) == "20x"
    steps = [(d.step, d.setting) for d in state.log.decisions]
    assert steps == [(0, "dense"), (1, "20x"), (2, "10x"), (3, "dense"), (4, "10x"), (5, "20x")]
    assert "gain 0.9 at 10x, 0.4 at 20x, epsilon 0.5" in state.log.decisions[2].reason


def test_gains_are_smoothed_with_the_number_of_ranks_over_a_hundred() -> None:
    state = make_state(world_size=32, alpha=0.0, window=100)
    feed(state, 1.0, 0.5)
    feed(state, 0.5, 0.25)
    assert state.search.floor_gain == pytest.approx(0.32 * 0.5 + 0.68 * 1.0)
    assert state.search.candidate_gain == pytest.approx(0.32 * 0.25 + 0.68 * 0.5)
    assert make_state(world_size=400, alpha=0.0)._alpha == 1


def test_a_window_brings_the_next_candidate_and_may_raise_the_floor() -> None:
    state = make_state()
    for _ in range(2):
        feed(state, 0.9, 0.6)
    # 0.9 and 0.6 are far apart: the floor stays, and the new candidate must be measured first.
    assert feed(state, 0.9, 0.6) == "10x"
    assert (state.explain()["floor"], state.explain()["candidate"]) == (10, 40)
    assert state.search.candidate_gain is None
    for _ in range(2):
        assert feed(state, 0.9, 0.895) == "40x"
    # Within 1 %: the floor becomes the candidate just tried, and the list goes on behind it.
    assert feed(state, 0.9, 0.895) == "40x"
    assert (state.explain()["floor"], state.explain()["candidate"]) == (40, 160)
    assert state.search.floor_gain == pytest.approx(0.895)
    assert state.factor() == 40


def test_the_last_candidate_stays_and_may_become_the_floor() -> None:
    state = make_state(window=1, low=10, high=20)
    assert state.explain()["candidate"] == 20
    feed(state, 0.9, 0.9)
    assert (state.explain()["floor"], state.explain()["candidate"]) == (20, 20)
    compressor = state.setting_for("w").compressor
    assert isinstance(compressor, TwoLevelSparsifier)
    assert compressor.candidate_only
    assert feed(state, 0.3, 0.3) == "dense"
    assert feed(state, 0.8, 0.8) == "20x"
    # Windows without a change are not logged, so the log keeps decisions.
    decided = len(state.log.decisions)
    for _ in range(10):
        feed(state, 0.8, 0.8)
    assert len(state.log.decisions) == decided


def test_throughput_is_the_speed_of_the_previous_step_times_its_gain() -> None:
    state = make_state(window=100)
    feed(state, 0.9, 0.6)
    feed(state, 0.9, 0.4, last_s=2.0)
    feed(state, 0.9, 0.4, last_s=1.0)
    feed(state, 0.9, 0.4, last_s=0.5)
    # Dense in 2 s; 20x at gain 0.4 in 1 s; 10x at gain 0.9 in 0.5 s.
    assert state.explain()["throughput"] == pytest.approx({1: 2.0, 20: 4 * 0.4, 10: 8 * 0.9})


def test_throughput_that_saturates_settles_on_the_lower_factor() -> None:
    state = make_state(window=2, low=10, high=80, policy="geometric", omega=0.1)
    feed(state, 0.8, 0.78)  # dense, 20x next
    feed(state, 0.8, 0.5, last_s=1.0)  # sent 20x; the window ends: next candidate is 40x
    assert state.explain()["candidate"] == 40
    assert state.factor() == 10
    feed(state, 0.8, 0.49, last_s=1.0)  # throughput of 20x is 4 * 0.5; now 10x was sent
    assert not state.search.frozen
    feed(state, 0.8, 0.49, last_s=1.6)  # throughput of 10x is 2.5 * 0.8 = 2.0, equal to 20x
    assert state.search.frozen
    assert (state.explain()["floor"], state.explain()["candidate"]) == (10, 10)
    assert "throughput saturates: settled on 10x" in state.log.decisions[-1].reason
    assert feed(state, 0.8, 0.8) == "10x"
    # The search has ended, however many windows pass.
    for _ in range(5):
        feed(state, 0.8, 0.8)
    assert (state.explain()["floor"], state.explain()["candidate"]) == (10, 10)


def test_a_settled_factor_above_the_floor_is_measured_first() -> None:
    state = make_state(window=1, low=10, high=80, policy="geometric")
    state.search.candidate = 2
    state.search.throughput = {1.0: [5.0], 10.0: [1.0], 20.0: [2.001], 40.0: [2.0]}
    assert feed(state, 0.9, 0.6) == "10x"
    assert state.search.frozen
    assert (state.explain()["floor"], state.explain()["candidate"]) == (10, 20)
    assert feed(state, 0.9, 0.7) == "20x"


def test_the_gain_of_a_settled_factor_is_its_own() -> None:
    state = make_state(window=1, low=10, high=80, policy="geometric", omega=0.1)
    state.search.throughput = {10.0: [2.0], 20.0: [2.0]}
    assert feed(state, 0.9, 0.85) == "10x"
    reason = state.log.decisions[-1].reason
    assert "the floor rises to 20x" in reason
    assert "settled on 10x; gain 0.9 at 10x, 0.9 at 10x" in reason


@pytest.mark.parametrize(("floor", "sent"), [(0.85, "10x"), (0.4, "dense")])
def test_the_gain_of_a_settled_factor_below_the_old_floor_is_unknown(
    floor: float, sent: str
) -> None:
    state = make_state(window=1, low=10, high=80, policy="geometric", omega=0.1)
    state.search.floor, state.search.candidate = 1, 2
    state.search.throughput = {10.0: [2.0], 40.0: [2.0]}
    # It keeps at least as much as the old floor, which compresses more.
    assert feed(state, floor, 0.2) == sent
    assert "settled on 10x; gain unknown at 10x" in state.log.decisions[-1].reason
    assert feed(state, 0.97, 0.97) == "10x"
    assert state.search.candidate_gain == state.search.floor_gain == 0.97


def test_dense_throughput_does_not_count_as_saturation() -> None:
    assert saturated_factor({1.0: 10.0, 20.0: 9.99}, 0.01) is None
    assert saturated_factor({1.0: 10.0, 20.0: 9.99, 10.0: 9.98}, 0.01) == 10
    assert saturated_factor({10.0: 9.0, 20.0: 9.99}, 0.01) is None
    assert saturated_factor({1280.0: 1029.9, 2000.0: 1035.4}, 0.01) == 1280


def test_a_settled_candidate_is_computed_alone_but_the_gate_stays() -> None:
    state = make_state(window=100)
    feed(state, 0.9, 0.6)
    state.search.frozen = True
    compressor = state.setting_for("w").compressor
    assert isinstance(compressor, TwoLevelSparsifier)
    assert compressor.candidate_only
    # The floor is not measured in this time: its gain stays at the last value.
    feed(state, 0.2, 0.6)
    assert state.search.floor_gain == 0.9
    assert feed(state, 0.2, 0.2) == "10x"
    compressor = state.setting_for("w").compressor
    assert isinstance(compressor, TwoLevelSparsifier)
    assert not compressor.candidate_only
    assert feed(state, 0.2, 0.2) == "dense"
    assert state.setting_for("w").dense
    assert feed(state, 0.9, 0.8) == "20x"


def test_one_outlier_does_not_decide_with_a_median() -> None:
    values: list[float] = []
    for value in (1.0, 1.1, 900.0):
        values = add_throughput(values, value, 0.5, "median")
    state = make_state(window=100, throughput="median")
    state.search.throughput[20.0] = values
    assert state.explain()["throughput"] == {20.0: 1.1}


@pytest.mark.parametrize(("how", "expected"), [("ewma", 0.95 * 32 + 0.05 * 3.6), ("median", 32)])
def test_one_outlier_does_not_end_the_search(how: str, expected: float) -> None:
    """By its throughput alone, 20x would seem as good as 10x when the window ends."""
    state = make_state(window=30, alpha=0.05, throughput=how, low=10, high=40, policy="geometric")
    state.search.throughput[10.0] = [3.6]
    for _ in range(29):
        feed(state, 0.9, 0.8, last_s=0.1)
    feed(state, 0.9, 0.8, last_s=4 * 0.8 / 3.6)
    assert state.explain()["candidate"] == 40
    assert not state.search.frozen
    assert state.explain()["throughput"] == pytest.approx({1: 40, 10: 3.6, 20: expected})


@pytest.mark.parametrize("ref", [0.0, math.nan, math.inf])
def test_zero_and_nonfinite_gradients_change_nothing(ref: float) -> None:
    state = make_state()
    feed(state, 0.9, 0.6)
    feed(state, 0.9, 0.6, last_s=1.0)
    before = state.state_dict()
    assert feed(state, 0.1, 0.1, last_s=9.0, ref=ref) == "20x"
    # Only the factor of the last step is discarded, since the timing does not belong to it.
    assert state.state_dict() == {**before, "last_factor": None}
    state.skip_step()
    assert state.state_dict() == {**before, "last_factor": None}


def test_definitions_of_the_gain() -> None:
    assert gain(0.0, 0.0, "l2sq") == 1
    assert gain(1.0, 4.0, "l2sq") == 0.25
    assert gain(1.0, 4.0, "l2") == 0.5
    assert gain(3.0, 4.0, "layer_l2") == 0.75
