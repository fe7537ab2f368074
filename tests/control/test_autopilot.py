"""Autopilot's decisions from laps and losses given by hand, and its runs on simulated ranks."""

import io
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.control.autopilot import Autopilot
from laconic.control.base import Heard
from laconic.control.clock import Lap, ModelClock, heard_of, told_by
from laconic.control.costs import Costs, Said
from laconic.control.courses import Option, best_course
from laconic.control.ladder import is_whole, ladder
from laconic.control.losses import Losses, progress
from laconic.control.navigator import BETTER, WORTH, Navigator
from laconic.errors import ConfigError
from laconic.network.model import LinkModel
from laconic.simulate import Simulation

FAST, SLOW = 1e9, 5e7
SHAPE = (1000, 1000)
COMPUTE_S, IDLE_S = 0.05, 0.004
KEPT = {0.5: 0.97, 0.2: 0.77, 0.1: 0.55, 0.05: 0.36, 0.02: 0.2, 0.01: 0.12}
"""Shares of the squares that a ratio of a gradient like Laplace's keeps, with a residual."""


class Fake:
    """Four ranks whose steps take what a link of a given rate makes them take."""

    def __init__(self, spec: str = "topk:ratio=0.01", work_s: float = 0.01) -> None:
        made = Autopilot(by="all").pilot(laconic.parse(spec), ["w"], 4)
        assert isinstance(made, Navigator)
        self.led, self.work_s, self.step = made, work_s, 0
        self.led.listen("w", torch.zeros(SHAPE), 1.0)
        self.last: tuple[Lap, float] | None = None

    def run(self, steps: int, rate_bits: float) -> str:
        for _ in range(steps):
            self.one(rate_bits)
        return self.led.explain()["setting"]  # type: ignore[return-value]

    def one(self, rate_bits: float, slow: float = 1.0) -> None:
        place = self.led.places["w"]
        rung, whole = self.led.chart.rungs[place], is_whole(place)
        factor = 1.5 if whole else 3
        sent = factor * rung.compressor.nbytes(SHAPE)
        wire_s = slow * (IDLE_S + 8 * sent / rate_bits)
        work_s = 0.0 if whole else self.work_s
        lap = Lap(COMPUTE_S + work_s + wire_s, work_s, wire_s, sent, work_s + wire_s)
        told: list[float] = []
        if self.last is not None and self.step % 16 == 1:
            told = [self.last[1], 1.0]
        self.step += 1
        before = None if self.last is None else self.last[0]
        step_s = None if before is None else before.step_s
        self.led.step(Heard(self.step, [(["w"], told)], step_s, before))
        self.last = lap, 0.0 if whole else 1 - KEPT.get(rung.value, 0.01)

    def settings(self) -> list[str]:
        return [decision.setting for decision in self.led.log.decisions]


def test_it_follows_the_link_down_and_up_again() -> None:
    fake = Fake()
    assert fake.run(40, FAST) == "bf16"
    # At step 100: 131 ms for 0.75 of a step, against 192 ms for 0.85 at 0.1.
    assert fake.run(60, SLOW) == "topk:ratio=0.05"
    assert fake.run(40, FAST) == "bf16"
    last = fake.led.log.decisions[-1]
    assert "instead of" in last.reason
    assert "the link carries" in last.reason


def test_it_finds_what_a_sweep_finds() -> None:
    for rate_bits in (2e7, 5e7, 2e8, 5e8, 2e9):
        fake = Fake()
        fake.run(160, rate_bits)
        costs = {}
        for place, rung in enumerate(fake.led.chart.rungs):
            factor, work_s = (1.5, 0.0) if is_whole(place) else (3, fake.work_s)
            bits = 8 * factor * rung.compressor.nbytes(SHAPE)
            lost = 0.0 if is_whole(place) else 1 - KEPT.get(rung.value, 0.01)
            worth = progress(lost, "choice", fake.step)
            if worth >= WORTH / BETTER:
                costs[place] = (COMPUTE_S + work_s + IDLE_S + bits / rate_bits) / worth
        assert costs[fake.led.places["w"]] <= 1.1 * min(costs.values())


def test_no_link_is_slow_enough_to_endanger_the_training() -> None:
    fake = Fake()
    for steps in range(20, 160, 20):
        fake.run(20, 1e5)
        # Half of the norm has to arrive at first, and later as much as a longer run allows.
        assert fake.led.chart.spot(fake.led.places).worth >= 0.5
        assert _worth(fake, steps) >= 0.45
    assert fake.settings()[2] == "topk:ratio=0.1"
    assert fake.settings()[-1] == "topk:ratio=0.01"


def _worth(fake: Fake, steps: int) -> float:
    value = fake.led.chart.rungs[fake.led.places["w"]].value
    return progress(1 - KEPT[value], "choice", steps)


def test_dense_where_the_link_is_so_fast_that_rounding_does_not_pay() -> None:
    fake = Fake("topk:ratio=0.1", work_s=0.05)
    assert fake.run(30, 1e12) in ("dense", "bf16")
    assert "topk:ratio=0.1" not in fake.settings()[1:]


def test_odd_laps_change_nothing() -> None:
    fake = Fake()
    before = fake.run(40, FAST)
    decisions = len(fake.led.log.decisions)
    for _ in range(20):
        fake.one(FAST, slow=50.0)
        assert fake.run(4, FAST) == before
    assert len(fake.led.log.decisions) == decisions


def test_it_reacts_within_a_few_steps() -> None:
    fake = Fake()
    fake.run(100, FAST)
    before = len(fake.led.log.decisions)
    fake.run(5, SLOW)
    assert len(fake.led.log.decisions) == before + 1


def test_who_waits_least_knows_the_link() -> None:
    laps = [Lap(1.0, 0.1, wire_s, 1e6, wire_s + 0.1) for wire_s in (0.5, 0.2, 0.3, 0.6)]
    told = [told_by(lap, rank, 4) for rank, lap in enumerate(laps)]
    mean = [sum(column) / 4 for column in zip(*told, strict=True)]
    heard = heard_of(mean, 4)
    # On average ranks waited 0.2 s more for others, which no setting changes.
    assert heard == pytest.approx(Lap(1.0, 0.1, 0.2, 1e6, 0.3))
    many = [told_by(Lap(1.0, 0.0, 2.0, 1.0, 2.0), rank, 100) for rank in range(100)]
    assert len(many[0]) == len(Lap._fields) + 16
    mean = [sum(column) / 100 for column in zip(*many, strict=True)]
    assert heard_of(mean, 100) == pytest.approx(Lap(1.0, 0.0, 2.0, 1.0, 2.0))


def test_latency_is_told_from_bytes_by_a_change_of_setting() -> None:
    costs = Costs(1.5, 3)
    for _ in range(3):
        costs.add(Said(0, 1_000_000, {2: 10}), Lap(1.0, 0.0, 0.6, 5e6, 0.6))
    assert costs.link().byte_s == pytest.approx(0.6 / 5e6)
    for _ in range(3):
        costs.add(Said(0, 100_000, {3: 10}), Lap(0.5, 0.0, 0.15, 5e5, 0.15))
    assert costs.idle_s == pytest.approx(0.1)
    assert costs.link().byte_s == pytest.approx(1e-7)
    # Ranks send five bytes for one of a message, whatever was believed.
    assert costs.part_sent == pytest.approx(5)


def test_the_work_of_a_mixture_is_put_down_to_its_settings() -> None:
    costs = Costs(1.5, 3)
    costs.add(Said(0, 10, {2: 100}), Lap(1.0, 0.4, 0.0, 10.0, 0.4))
    costs.add(Said(10, 5, {0: 50, 2: 50}), Lap(1.0, 0.1, 0.0, 10.0, 0.1))
    # All that is said needs no encoding as far as is known, so the rest has become faster.
    assert costs.element_s == pytest.approx({0: 0.0, 2: 0.002})
    assert costs.work_s(5, 1000) == pytest.approx(2.0)
    assert costs.work_s(1, 1000) == 0


def test_what_is_hidden_behind_the_computation_costs_nothing() -> None:
    costs = Costs(1.5, 3)
    for _ in range(5):
        costs.add(Said(0, 10, {2: 10}), Lap(1.0, 0.2, 0.4, 1e6, 0.0))
    link = costs.link()
    assert link.step_s(-0.3) == pytest.approx(1.0)
    # What would be more than now is not known to be hidden.
    assert link.step_s(0.4) == pytest.approx(1.4)


def test_losses_of_settings_go_together() -> None:
    losses = Losses()
    losses.sample(3, 1.0, 2.0, "choice")
    # A quarter of the entries keeps a quarter at least; four times as many keep perhaps twice.
    assert losses.at(4, [9, 9, 0.4, 0.1, 0.025], "choice") == pytest.approx(0.875)
    assert losses.at(2, [9, 9, 0.4, 0.1, 0.025], "choice") == pytest.approx(0.0)
    losses.sample(4, 1.2, 2.0, "choice")
    assert losses.error == pytest.approx({3: 1 - 0.5 / 0.99, 4: 0.6})
    losses = Losses({3: 0.5, 4: 1 - 0.4 * 0.99}, latest=3)
    losses.sample(3, 7.0, 10.0, "choice")
    # Kept fell from 0.5 to 0.4 where it was sampled, so from 0.4 to 0.32 there.
    assert losses.error == pytest.approx({3: 0.6, 4: 0.68})
    losses.sample(4, 9.0, 10.0, "choice")
    # It has not been looked at for a while: the new counts alone, and says nothing of others.
    assert losses.error == pytest.approx({3: 1 - 0.4 / 0.99, 4: 0.9})
    losses.sample(0, 0.0, 20.0, "choice")
    assert losses.error == pytest.approx({3: 1 - 0.4 / 0.99**2, 4: 1 - 0.1 / 0.99})
    assert losses.energy == 15
    rounding = Losses({2: 0.01})
    assert rounding.at(3, [9, 9, 4, 3], "noise") == pytest.approx(0.04)


def test_what_was_bad_once_is_tried_again_but_seldom() -> None:
    fake = Fake("topk:ratio=0.02")
    fake.run(1500, 1e5)
    # Left at once, since ratios below 0.01 keep far less than they promise, and seen again.
    assert 2 <= fake.settings().count("topk:ratio=0.005") <= 4
    assert len(fake.settings()) < 15


def test_what_a_step_is_worth() -> None:
    assert progress(0.0, "choice", 10) == progress(0.0, "noise", 10) == 1
    # Half of the norm: 50 steps behind, whenever that is.
    assert progress(0.75, "choice", 50) == 0.5
    assert progress(0.75, "choice", 20) == 0.5
    assert progress(0.75, "choice", 450) == pytest.approx(0.9)
    assert progress(2.0, "rounding", 50) < 0.01
    assert progress(1.0, "noise", 50) == progress(1.0, "noise", 450) == 0.5


def test_the_best_course_is_the_best_of_all_mixtures() -> None:
    """For any number of layers it is at a corner of the hull, and no mixture beats it by much."""
    rng = random.Random(0)
    for _ in range(20):
        layers = []
        for _ in range(4):
            times = sorted((rng.random() for _ in range(4)), reverse=True)
            losses = [0.0, *sorted(rng.random() for _ in range(3))]
            layers.append(
                [Option(p, t, x) for p, (t, x) in enumerate(zip(times, losses, strict=True))]
            )

        def judge(cost_s: float, lost: float) -> float:
            return (1 + cost_s) * (1 + lost)

        course = best_course(layers, judge)
        chosen = [options[p] for options, p in zip(layers, course.places, strict=True)]
        assert course.cost_s == pytest.approx(sum(o.cost_s for o in chosen))
        assert course.lost == pytest.approx(sum(o.lost for o in chosen))
        every = [
            judge(sum(o.cost_s for o in mixture), sum(o.lost for o in mixture))
            for mixture in itertools.product(*layers)
        ]
        assert min(every) <= judge(course.cost_s, course.lost) <= 1.1 * min(every)


def test_layers_that_lose_least_for_their_bytes_say_less_first() -> None:
    dense, same = Option(0, 1.0, 0.0), Option(0, 1.0, 0.0)
    easy, hard = Option(1, 0.1, 0.1), Option(1, 0.1, 0.8)
    for limit, places in ((0.05, [0, 0]), (0.2, [1, 0]), (1.0, [1, 1])):

        def judge(cost_s: float, lost: float, limit: float = limit) -> float:
            return cost_s if lost <= limit else math.inf

        assert best_course([[dense, easy], [same, hard]], judge).places == places
    # What takes as long and loses more is never chosen, nor what others surpass on both sides.
    poor = [dense, Option(1, 0.9, 0.9), Option(2, 0.2, 0.1), Option(3, 0.3, 0.5)]
    assert best_course([poor], lambda cost_s, lost: cost_s).places == [2]


def test_ladders() -> None:
    def names(spec: str, key: str) -> list[str]:
        return [rung.words() for rung in ladder(laconic.parse(spec), key)]

    top = names("topk:ratio=0.03", "ratio")
    assert top[:2] == ["dense", "bf16"]
    assert top[5:8] == ["topk:ratio=0.05", "topk:ratio=0.03", "topk:ratio=0.02"]
    assert names("powersgd:rank=4", "rank")[-3:] == [f"powersgd:rank={r}" for r in (4, 2)] + [
        "powersgd"
    ]
    # With fewer bits than four it would be no contraction any more.
    assert names("qsgd:bits=5", "bits")[2:] == [f"qsgd:bits={b}" for b in (8, 7, 6, 5)] + ["qsgd"]
    assert "topk:ratio=0.1 | qsgd" in names("topk:ratio=0.01 | qsgd:bits=4", "ratio")


@pytest.mark.parametrize(
    ("spec", "controller", "message"),
    [
        ("efsign", "autopilot", "autopilot: efsign has no factor"),
        ("topk:ratio=0.1", "autopilot:setting=bits", "autopilot: topk:ratio=0.1 has no factor"),
        ("topk:ratio=0.1", "autopilot:setting=size", "autopilot: setting must be auto or one of"),
        ("topk:ratio=0.1", "autopilot:by=bucket", "autopilot: by must be one of"),
        ("topk:ratio=0.1", "autopilot:epsilon=1", "autopilot: unknown parameter"),
    ],
)
def test_a_mistake_is_named(spec: str, controller: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        laconic.simulate({"w": torch.zeros(64, 64)}, spec, workers=2, controller=controller)
    assert str(caught.value).startswith(message)


def simulation(spec: str = "topk:ratio=0.01") -> Simulation:
    parameters = {"w": torch.zeros(64, 256), "b": torch.zeros(8)}
    link = LinkModel(1e-4, 2e7)
    return laconic.simulate(
        parameters, spec, workers=4, controller="autopilot", link=link, compute_s=0.02
    )


def gradients(step: int) -> list[dict[str, Tensor]]:
    """Different on every rank, with heavy tails."""

    def one(rank: int) -> Tensor:
        normal = torch.randn(64, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        return normal * normal.abs()

    return [{"w": one(rank), "b": torch.ones(8)} for rank in range(4)]


def set_rate(led: Simulation, rate_bits: float) -> None:
    for worker in led.workers:
        assert worker.helm is not None
        assert isinstance(worker.helm.clock, ModelClock)
        worker.helm.clock.link = LinkModel(1e-4, rate_bits)


def explained(led: Simulation) -> Mapping[str, Any]:
    return led.stats()["controller"]  # type: ignore[return-value]


def pilots(led: Simulation) -> list[Navigator]:
    found = [worker.helm.pilot for worker in led.workers if worker.helm is not None]
    assert all(isinstance(pilot, Navigator) for pilot in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "dgc:ratio=0.05"])
def test_simulated_ranks_decide_the_same_and_follow_the_link(spec: str) -> None:
    led = simulation(spec)
    settings, worths = [], []
    for phase, rate_bits in enumerate((1e9, 1e6, 1e9)):
        set_rate(led, rate_bits)
        for step in range(30):
            led.step(gradients(100 * phase + step))
        settings.append(explained(led)["setting"])
        worths.append(explained(led)["settings"][settings[-1]]["worth"])
        assert len({str(pilot.places) for pilot in pilots(led)}) == 1
    assert worths[1] < 0.8
    assert min(worths[0], worths[2]) > 0.9
    assert settings[1].startswith(spec.partition(":")[0])
    saved = [str({k: v for k, v in pilot.save().items() if k != "lost"}) for pilot in pilots(led)]
    assert len(set(saved)) == 1


def test_a_choice_at_random_is_not_worth_its_bytes() -> None:
    """Half of the entries are worth 0.7 of a step, and all of them in 16 bits are no longer."""
    led = simulation("randomk:ratio=0.1")
    set_rate(led, 1e6)
    for step in range(30):
        led.step(gradients(step))
    assert explained(led)["setting"] == "bf16"
    assert explained(led)["settings"]["randomk:ratio=0.1"]["worth"] < 0.5


@pytest.mark.parametrize("spec", ["powersgd:rank=4", "qsgd:bits=4", "topk:ratio=0.1 | qsgd:bits=4"])
def test_other_methods_are_steered_too(spec: str) -> None:
    led = simulation(spec)
    for step in range(24):
        led.step(gradients(step))
    assert explained(led)["settings"]["dense"]["worth"] == 1
    assert len(explained(led)["settings"]) > 3
    assert all(math.isfinite(row["step_ms"]) for row in explained(led)["settings"].values())


def test_a_run_that_was_saved_goes_on_to_the_bit() -> None:
    first, second = simulation(), simulation()
    for step in range(17):
        first.step(gradients(step))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    # The clocks of simulations count from the meters, which are no part of a state.
    for old, new in zip(first.network.meters, second.network.meters, strict=True):
        new.sent_bytes, new.calls = old.sent_bytes, old.calls
    for old_worker, new_worker in zip(first.workers, second.workers, strict=True):
        assert old_worker.helm is not None
        assert new_worker.helm is not None
        vars(new_worker.helm.clock).update(
            {k: v for k, v in vars(old_worker.helm.clock).items() if k.startswith("_")}
        )
    for led in (first, second):
        set_rate(led, 1e9)
    for step in range(17, 60):
        one, other = first.step(gradients(step)), second.step(gradients(step))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert explained(first) == explained(second)
    assert len(explained(first)["decisions"]) > 2


def test_steps_that_do_not_count_move_nothing() -> None:
    led = simulation()
    for step in range(20):
        led.step(gradients(step))
    before = pilots(led)[0].chart.save()
    for _ in range(3):
        bad = gradients(0)
        bad[2]["w"][0, 0] = math.nan
        led.step(bad)
        assert pilots(led)[0].chart.save() == before


def test_gradients_of_zeros_say_nothing_about_settings() -> None:
    led = simulation()
    for _ in range(40):
        led.step([{"w": torch.zeros(64, 256), "b": torch.zeros(8)} for _ in range(4)])
    assert pilots(led)[0].chart.layers["w"].losses.error == {}
    assert explained(led)["setting"] == "topk:ratio=0.01"
    for step in range(20):
        led.step(gradients(step))
    assert pilots(led)[0].chart.layers["w"].losses.error


def test_a_switch_keeps_what_is_known_of_the_link() -> None:
    led = simulation()
    for step in range(20):
        led.step(gradients(step))
    idle_s = pilots(led)[0].chart.costs.idle_s
    led.switch("randomk:ratio=0.1")
    assert pilots(led)[0].chart.costs.idle_s == idle_s
    assert pilots(led)[0].chart.costs.recent
    assert pilots(led)[0].chart.layers == {}
    assert explained(led)["setting"] == "randomk:ratio=0.1"
    with pytest.raises(ConfigError, match="no factor"):
        led.switch("efsign")
    led.step(gradients(21))


def test_residuals_are_said_when_all_is() -> None:
    """With the residual memory, what is sent plus what is left is what was given."""
    led = simulation()
    given, sent = torch.zeros(64, 256), torch.zeros(64, 256)
    for step in range(40):
        set_rate(led, 1e9 if step < 20 else 1e6)
        found = gradients(step)
        given += torch.stack([one["w"] for one in found]).mean(0)
        sent += led.step(found)["w"]
    left = torch.stack([worker.lanes["w"].kept["residual"] for worker in led.workers]).mean(0)
    # bf16 sums round, and that is in nobody's residual.
    torch.testing.assert_close(sent + left.view(64, 256), given, rtol=0.02, atol=0.1)


def two_layers(step: int) -> list[dict[str, Tensor]]:
    """One layer whose gradient is a hundredth of its entries, and one of which all are alike."""

    def one(rank: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(10 * step + rank)
        flat, peaks = torch.randn(2, 64, 256, generator=dice)
        return {"peaks": 10 * peaks * (torch.arange(256) % 100 == 0), "flat": flat}

    return [one(rank) for rank in range(4)]


def by(how: str) -> Simulation:
    tensors = {"peaks": torch.zeros(64, 256), "flat": torch.zeros(64, 256)}
    return laconic.simulate(
        tensors,
        "topk:ratio=0.2",
        workers=4,
        controller=f"autopilot:by={how}",
        link=LinkModel(1e-4, 2e6),
        compute_s=0.02,
    )


def test_layers_get_settings_of_their_own() -> None:
    led, alike = by("layer"), by("all")
    for step in range(120):
        led.step(two_layers(step))
        alike.step(two_layers(step))
    explained_all, found = explained(alike), explained(led)
    assert "layers" not in explained_all
    places = pilots(led)[0].places
    # Two hundredths of the one are all of it; of the other, twice as much says little more.
    assert places["peaks"] < places["flat"]
    assert set(found["layers"]) == {"peaks", "flat"}
    assert ", " in found["setting"]
    assert len({str(pilot.places) for pilot in pilots(led)}) == 1
    reasons = [decision["reason"] for decision in found["decisions"][1:]]
    assert all(reason.startswith("of 2 layers ") for reason in reasons)
    # No setting that all layers share is clearly better, as far as anybody knows.
    chart = pilots(led)[0].chart
    here = chart.spot(places)
    alone = [chart.spot(chart.uniform(place)) for place in range(len(chart.rungs))]
    assert BETTER * here.cost_s < min(spot.cost_s for spot in alone if spot.worth >= WORTH)


def test_layers_do_not_flicker() -> None:
    led = by("layer")
    for step in range(400):
        led.step(two_layers(step))
    late = [d for d in explained(led)["decisions"] if d["step"] > 200]
    assert len(late) <= 4


def test_a_layer_without_gradients_is_in_nobodys_way() -> None:
    led = by("layer")
    for step in range(60):
        given = two_layers(step)
        for one in given:
            one["flat"].zero_()
        led.step(given)
    # Nothing is known of it; the other one goes on.
    assert pilots(led)[0].chart.layers["flat"].losses.error == {}
    assert pilots(led)[0].chart.layers["peaks"].losses.error
    assert explained(led)["layers"]["peaks"] == "topk:ratio=0.02"


def test_a_lower_learning_rate_is_another_run() -> None:
    fake = Fake()
    fake.run(150, SLOW)
    before = fake.led.chart.spot(fake.led.places).worth
    fake.led.epoch(150, 0.1)
    fake.led.epoch(150, 0.08)
    fake.run(1, SLOW)
    assert fake.led.chart.steps == 151
    fake.led.epoch(151, 0.05)
    fake.run(1, SLOW)
    assert fake.led.chart.steps == 1
    assert fake.led.chart.spot(fake.led.places).worth < before
    fake.run(30, SLOW)
    fake.led.rate_changed(182, 0.05, 0.5)
    fake.led.rate_changed(182, 0.5, 0.2)
    fake.run(1, SLOW)
    assert fake.led.chart.steps == 1
