"""Autopilot on simulated ranks."""

import io
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.state import load, load_resized, save
from gradwire.comm.cost_model import LinkModel
from gradwire.control.autopilot import BETTER, WORTH, Navigator
from gradwire.control.timing import ModelClock
from gradwire.errors import ConfigError
from gradwire.simulate import Simulation


def simulation(spec: str = "topk:ratio=0.01", workers: int = 4) -> Simulation:
    parameters = {"w": torch.zeros(64, 256), "b": torch.zeros(8)}
    link = LinkModel(1e-4, 2e7)
    return gradwire.simulate(
        parameters, spec, workers=workers, controller="autopilot", link=link, compute_s=0.02
    )


def gradients(step: int, workers: int = 4) -> list[dict[str, Tensor]]:
    """Different on every rank, with heavy tails."""

    def one(rank: int) -> Tensor:
        normal = torch.randn(64, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        return normal * normal.abs()

    return [{"w": one(rank), "b": torch.ones(8)} for rank in range(workers)]


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
    assert worths[1] < 0.9 < min(worths[0], worths[2])
    assert settings[1].startswith(spec.partition(":")[0])
    saved = [str({k: v for k, v in pilot.save().items() if k != "lost"}) for pilot in pilots(led)]
    assert len(set(saved)) == 1


def test_a_choice_at_random_has_to_be_of_more_entries() -> None:
    """And half of them are worth less than all of them in 16 bits, which are no longer."""
    found = {}
    for method in ("topk", "randomk"):
        led = simulation(f"{method}:ratio=0.1")
        set_rate(led, 1e6)
        for step in range(60):
            led.step(gradients(step))
        found[method] = explained(led)
    assert found["randomk"]["setting"] == "randomk:ratio=0.05"
    assert found["topk"]["setting"] == "topk:ratio=0.01"
    settings = found["randomk"]["settings"]
    assert settings["randomk:ratio=0.5"]["worth"] < 0.9
    assert settings["randomk:ratio=0.5"]["step_ms"] >= settings["bf16"]["step_ms"]


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


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "acpsgd:rank=2"])
def test_a_run_that_has_left_its_method_is_saved_too(spec: str) -> None:
    """Rank 2 was tried, then a higher one, whose warm start waits while all is said in 16 bits."""
    first, second = simulation(spec), simulation(spec)
    set_rate(first, 1e9)
    for step in range(20):
        first.step(gradients(step))
    assert explained(first)["setting"] in ("bf16", "dense")
    assert (
        first.workers[0].lanes["w"].aggregator_state["q"].shape
        != second.workers[0].lanes["w"].aggregator_state["q"].shape
    )
    second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
    one, other = first.step(gradients(20)), second.step(gradients(20))
    assert torch.equal(one["w"], other["w"])


def test_a_state_that_is_refused_leaves_no_trace() -> None:
    first, second = simulation("powersgd:rank=2"), simulation("powersgd:rank=2")
    for step in range(20):
        first.step(gradients(step))
    state = save(first.workers[0])
    state["lanes"]["b"]["kept"] = {"odd": torch.zeros(3)}  # type: ignore[index]
    before = save(second.workers[0])
    with pytest.raises(ConfigError, match="state of b"):
        load(second.workers[0], state)
    assert str(save(second.workers[0])) == str(before)


def test_another_number_of_ranks_starts_with_costs_of_its_own() -> None:
    few, many, fresh = simulation(workers=2), simulation(workers=8), simulation(workers=8)
    for step in range(20):
        few.step(gradients(step, 2))
    states = [save(worker) for worker in few.workers]
    for worker in many.workers:
        load_resized(worker, states, "fold")
    known = pilots(few)[0].chart.layers["w"].save()
    assert all(led.chart.layers["w"].save() == known for led in pilots(many))
    assert all(led.chart.costs == pilots(fresh)[0].chart.costs for led in pilots(many))
    for step in range(40):
        many.step(gradients(step, 8))
    assert len({str(led.places) for led in pilots(many)}) == 1
    assert pilots(many)[0].chart.costs.part_sent == pytest.approx(7, rel=0.1)


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "powersgd:rank=2", "qsgd:bits=4"])
def test_a_rank_that_is_alone(spec: str) -> None:
    led = simulation(spec, workers=1)
    for step in range(80):
        led.step(gradients(step, 1))
    assert explained(led)["settings"]


def test_gradients_of_zeros_are_no_samples_though_residuals_wait() -> None:
    led = simulation()
    for step in range(20):
        led.step(gradients(step))
    losses = pilots(led)[0].chart.layers["w"].save()
    for _ in range(40):
        led.step([{"w": torch.zeros(64, 256), "b": torch.zeros(8)} for _ in range(4)])
    assert pilots(led)[0].chart.layers["w"].save() == losses


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
    assert explained(led)["decisions"][-1]["step"] == 20
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
    left = torch.stack([worker.lanes["w"].memory_state["residual"] for worker in led.workers]).mean(
        0
    )
    # bf16 sums round, and that is in nobody's residual.
    torch.testing.assert_close(sent + left.view(64, 256), given, rtol=0.02, atol=0.1)


def two_layers(step: int) -> list[dict[str, Tensor]]:
    """One layer whose gradient is a hundredth of its entries, and one of which all are alike."""

    def one(rank: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(10 * step + rank)
        flat, peaks = torch.randn(2, 64, 256, generator=dice)
        return {"peaks": 10 * peaks * (torch.arange(256) % 100 == 0), "flat": flat}

    return [one(rank) for rank in range(4)]


def by(rounds_like: str) -> Simulation:
    tensors = {"peaks": torch.zeros(64, 256), "flat": torch.zeros(64, 256)}
    return gradwire.simulate(
        tensors,
        "topk:ratio=0.2",
        workers=4,
        controller=f"autopilot:by={rounds_like}",
        link=LinkModel(1e-4, 1e6),
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
    # A hundredth of the one is all of it; of the other, twice as much says little more.
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
