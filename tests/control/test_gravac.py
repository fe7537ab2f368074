"""GraVAC's decisions, step by step as computed by hand, and its runs on simulated ranks."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.checkpoint import load_resized, save
from laconic.compressors.randomk import RandomK
from laconic.compressors.topk import TopK
from laconic.control.base import Heard
from laconic.control.explorer import Explorer
from laconic.control.gain import gain, noted, saturated
from laconic.control.gravac import GraVAC
from laconic.control.levels import DenseBeside, Gauge, Levels, at_factor, levels
from laconic.errors import ConfigError
from laconic.types import Given, Turn


def pilot(size: int = 4, **settings: object) -> Explorer:
    usual: dict[str, object] = {"alpha": 1.0, "window": 3, "epsilon": 0.5, "gain_norm": "l2sq"}
    rule = GraVAC(**{**usual, **settings})  # type: ignore[arg-type]
    made = rule.pilot(laconic.parse("topk:ratio=0.1"), ["w"], size)
    assert isinstance(made, Explorer)
    return made


def feed(
    led: Explorer, floor: float, candidate: float, last_s: float | None = None, ref: float = 1.0
) -> str:
    """A step in which the levels keep so much; what is sent next."""
    led.step(Heard(led.known.seen + 1, [(["w"], [ref, floor, candidate])], last_s))
    return led.explain()["setting"]  # type: ignore[return-value]


def test_the_published_lists_of_candidates() -> None:
    assert GraVAC(low=10, high=1000).factors() == [10, 20, 40, 160, 1000]
    geometric = GraVAC(low=10, high=2000, policy="geometric")
    assert geometric.factors() == [10, 20, 40, 80, 160, 320, 640, 1280, 2000]
    assert GraVAC(low=1.5, high=48, policy="geometric").factors() == [1.5, 3, 6, 12, 24, 48]


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
def test_one_odd_step_does_not_settle_the_search(how: str, left: float) -> None:
    """Had its throughput alone counted, 20x would seem as good as 10x when the window ends."""
    led = pilot(window=30, alpha=0.05, throughput=how, low=10, high=40, policy="geometric")
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


SPARSIFIERS = ["topk", "dgc", "redsync", "randomk", "sidco"]


def gradients(step: int, workers: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"w": (64, 80), "v": (50, 60), "b": (40,)}
    return [
        {n: torch.randn(s, generator=generator) ** 3 for n, s in shapes.items()}
        for _ in range(workers)
    ]


def run_of(spec: str, controller: str, **options: object) -> laconic.Simulation:
    tensors = {name: torch.zeros_like(g) for name, g in gradients(0)[0].items()}
    return laconic.simulate(tensors, spec, workers=4, controller=controller, **options)  # type: ignore[arg-type]


def pilots(run: laconic.Simulation) -> list[Explorer]:
    found = [w.helm.pilot for w in run.workers if w.helm is not None]
    return [led for led in found if isinstance(led, Explorer)]


def test_the_top_of_the_top_is_the_top() -> None:
    run = run_of("topk:ratio=0.5,values=fp32", "gravac:low=4,high=16,epsilon=0.01,window=100")
    plain = laconic.simulate(
        {n: torch.zeros_like(g) for n, g in gradients(0)[0].items()},
        "topk:ratio=0.125,values=fp32",
        workers=4,
    )
    run.step(gradients(0))  # dense, so that both start with no residual
    for step in range(1, 4):
        assert torch.equal(run.step(gradients(step))["w"], plain.step(gradients(step))["w"])
    assert pilots(run)[0].factor() == 8


def selections(alone: bool, sends: str) -> list[int]:
    """Of how many entries each choice is made in one step."""
    chosen_from: list[int] = []

    @dataclass(frozen=True)
    class Counting(TopK):
        def select(self, given: Given, turn: Turn) -> Tensor:
            chosen_from.append(turn.numel)
            return TopK.select(self, given, turn)

    gauge = Gauge(raw=False)
    gauge.start()
    made = levels(Counting(ratio=0.1), 10, 100, sends, alone, gauge)  # type: ignore[arg-type]
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert isinstance(made, Levels)
    made.select(Given(x), Turn((5000,), 0, 1, 0, 0))
    return chosen_from


def test_the_second_level_chooses_among_the_first_and_none_is_computed_in_vain() -> None:
    assert selections(alone=False, sends="candidate") == [5000, 500]
    assert selections(alone=False, sends="floor") == [5000, 500]
    # Once the search has settled there is one choice, and it is made directly.
    assert selections(alone=True, sends="candidate") == [5000]


def test_random_k_of_random_k_is_random_k_in_law() -> None:
    """Every entry has the same chance, and what the second level takes is part of the first's."""
    base, draws = RandomK(ratio=0.25), 2000
    counts = torch.zeros(64)
    for draw in range(draws):
        gauge = Gauge(raw=False)
        made = levels(base, 4, 16, "candidate", False, gauge)
        assert isinstance(made, Levels)
        turn = Turn((64,), 0, 1, draw, 7)
        index = made.select(Given(torch.randn(64)), turn)
        first = at_factor(base, 4).select(Given(torch.zeros(64)), turn)
        assert set(index.tolist()) <= set(first.tolist())
        assert index.unique().numel() == 4
        counts[index] += 1
    # Each of 64 is drawn with probability 1/16, so 125 times; 5 standard deviations are 54.
    assert (counts - draws / 16).abs().max() < 54


@pytest.mark.parametrize("exchange", ["auto", "gather", "sharded", "hierarchical:node=2"])
@pytest.mark.parametrize("spec", [*SPARSIFIERS, "topk:ratio=0.1 | qsgd:bits=8,scaled=true"])
def test_what_is_sent_and_what_is_left_is_what_was_given(spec: str, exchange: str) -> None:
    spec = spec if "|" in spec else f"{spec}:ratio=0.1"
    # A third of all entries at random is a third of the squares: a gain of 0.577.
    epsilon = 0.5 if spec.startswith("randomk") else 0.6
    rule = f"gravac:low=3,high=100,epsilon={epsilon},window=2,policy=geometric"
    run = run_of(spec, rule, exchange=exchange)
    given = torch.zeros(64 * 80)
    got = torch.zeros(64 * 80)
    sent = set()
    for step in range(10):
        sent.add(pilots(run)[0].factor())
        grads = gradients(step)
        given += torch.stack([g["w"].view(-1) for g in grads]).mean(0)
        got += run.step(grads)["w"].view(-1)
        states = [led.save() for led in pilots(run)]
        assert all(state == states[0] for state in states)
    assert len(sent) > 1
    left = torch.stack([w.lanes["w"].kept["residual"] for w in run.workers]).mean(0)
    if exchange == "sharded":
        left += torch.cat([w.lanes["w"].talk["server"] for w in run.workers])
    torch.testing.assert_close(got + left, given, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("memory", ["momentum", "none", "ef21", "lowbit"])
def test_other_memories_than_the_residual(memory: str) -> None:
    run = run_of("dgc:ratio=0.1", "gravac:low=3,high=100,epsilon=0.5,window=2", memory=memory)
    for step in range(4):
        assert run.step(gradients(step))["w"].isfinite().all()
    assert pilots(run)[0].known.seen == 4
    assert pilots(run)[0].factor() > 1


def test_a_dense_step_leaves_no_residual() -> None:
    run = run_of("topk:ratio=0.1", "gravac:low=10,high=1000,epsilon=1,window=5")
    for step in range(3):
        run.step(gradients(step))
        assert run.stats()["residual_norm"] == 0
    assert isinstance(run.workers[0].lanes["w"].compressor, DenseBeside)


@pytest.mark.parametrize("norm", ["l2sq", "l2", "layer_l2"])
@pytest.mark.parametrize("ref", ["ef", "raw"])
def test_gains_are_those_of_all_ranks_and_layers(norm: str, ref: str) -> None:
    rule = f"gravac:low=4,high=16,epsilon=0.1,window=100,gain_norm={norm},gain_ref={ref},alpha=1"
    run = run_of("topk:ratio=0.5,values=fp32", rule)
    for step in range(2):
        run.step(gradients(step))
    left = [{n: w.lanes[n].kept["residual"] for n in "wv"} for w in run.workers]
    kept, reference = [], []
    grads = gradients(2)
    for rank, residuals in enumerate(left):
        for name, residual in residuals.items():
            raw = grads[rank][name].view(-1)
            total = raw + residual
            kept.append(total.abs().topk(total.numel() // 4).values.norm())
            reference.append((raw if ref == "raw" else total).norm())
    run.step(grads)
    tops, alls = torch.stack(kept), torch.stack(reference)
    expected = {
        "l2sq": tops.square().sum() / alls.square().sum(),
        "l2": (tops.square().sum() / alls.square().sum()).sqrt(),
        "layer_l2": tops.sum() / alls.sum(),
    }[norm]
    assert pilots(run)[0].known.floor_gain == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        ("dgc:ratio=0.1", {}, "inf"),
        # Nobody looks for it here.
        ("topk:ratio=0.1", {"nan_policy": "ignore", "memory": "none"}, "nan"),
    ],
)
def test_spoilt_gradients_move_nothing(spec: str, options: dict[str, Any], value: str) -> None:
    run = run_of(spec, "gravac:low=3,high=100,epsilon=0.5,window=2", **options)
    for step in range(3):
        run.step(gradients(step))
    before = pilots(run)[0].save()
    spoilt = gradients(3)
    spoilt[2]["v"][0, 0] = float(value)
    run.step(spoilt)
    assert pilots(run)[0].save() == {**before, "last_factor": None}


def test_zero_gradients_move_nothing() -> None:
    fresh = run_of("dgc:ratio=0.1", "gravac:low=3,high=100")
    zero = [{n: torch.zeros_like(g) for n, g in one.items()} for one in gradients(0)]
    fresh.step(zero)
    assert pilots(fresh)[0].known.seen == 0


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_goes_on_with_another_number_of_ranks(size: int) -> None:
    rule = "gravac:low=3,high=100,epsilon=0.5,window=2"
    run = run_of("topk:ratio=0.1", rule)
    for step in range(5):
        run.step(gradients(step))
    states = [save(worker) for worker in run.workers]
    tensors = {name: torch.zeros_like(g) for name, g in gradients(0)[0].items()}
    other = laconic.simulate(tensors, "topk:ratio=0.1", workers=size, controller=rule)
    for worker in other.workers:
        load_resized(worker, states, "redistribute")
    assert [led.save() for led in pilots(other)] == size * [pilots(run)[0].save()]
    other.step(gradients(5, size))
    assert {led.known.seen for led in pilots(other)} == {6}


def test_numbers_ride_with_the_messages() -> None:
    plain = run_of("topk:ratio=0.1", "schedule:last=0.1", exchange="gather")
    led = run_of("topk:ratio=0.1", "gravac:low=10,high=20,epsilon=0.01", exchange="gather")
    calls = []
    for run in (plain, led):
        for step in range(2):
            run.step(gradients(step))
        before = run.network.meters[0].calls
        run.step(gradients(2))
        calls.append(run.network.meters[0].calls - before)
    assert calls == [1, 1]


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "randomk:ratio=0.1"])
def test_resumes_to_the_bit(spec: str) -> None:
    rule = "gravac:low=2,high=64,epsilon=0.55,window=3,policy=geometric"
    whole = run_of(spec, rule)
    outs = [whole.step(gradients(step))["w"] for step in range(12)]
    first, second = run_of(spec, rule), run_of(spec, rule)
    for step in range(7):
        first.step(gradients(step))
    second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
    for step in range(7, 12):
        assert torch.equal(second.step(gradients(step))["w"], outs[step])
    assert second.stats()["controller"] == whole.stats()["controller"]


def test_switch_starts_to_explore_anew_and_says_so() -> None:
    run = run_of("topk:ratio=0.1", "gravac:low=3,high=100,epsilon=0.5,window=2")
    for step in range(3):
        run.step(gradients(step))
    residual = run.workers[1].lanes["w"].kept["residual"].clone()
    run.switch("redsync:ratio=0.1")
    assert pilots(run)[0].known.seen == 0
    assert torch.equal(run.workers[1].lanes["w"].kept["residual"], residual)
    run.step(gradients(3))
    assert pilots(run)[0].known.seen == 1


BAD = {
    "gravac:low=10,high=10": "1 < low < high",
    "gravac:low=100,high=10": "1 < low < high",
    "gravac:low=0.5": "1 < low < high",
    "gravac:high=inf": "1 < low < high",
    "gravac:low=nan": "1 < low < high",
    "gravac:window=0": "window must be at least 1",
    "gravac:epsilon=0": "epsilon must be in",
    "gravac:epsilon=1.5": "epsilon must be in",
    "gravac:omega=-1": "omega must be in",
    "gravac:alpha=2": "alpha must be in",
    "gravac:policy=linear": "policy must be one of",
    "gravac:gain_norm=l3": "gain_norm must be one of",
}


@pytest.mark.parametrize("controller", BAD)
def test_bad_input(controller: str) -> None:
    with pytest.raises(ConfigError, match=BAD[controller]):
        run_of("topk:ratio=0.1", controller)


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="gravac: low must be a number, got '10'"):
        GraVAC(low="10")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gravac: high must be a number, got None"):
        GraVAC(high=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["efsign", "powersgd:rank=2", "threshold:value=0.1", "none"])
def test_a_compressor_without_a_factor(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"gravac: .* has no factor"):
        run_of(spec, "gravac")
