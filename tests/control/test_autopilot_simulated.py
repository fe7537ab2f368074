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
from gradwire.control.autopilot import MIN_PROGRESS, SWITCH_RATIO, AutopilotState
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.timing import ModelClock
from gradwire.errors import ConfigError
from gradwire.simulation import Simulation


def simulation(spec: str = "topk:ratio=0.01", workers: int = 4) -> Simulation:
    parameters = {"w": torch.zeros(64, 256), "b": torch.zeros(8)}
    link = LinkModel(1e-4, 2e7)
    return gradwire.simulate(
        parameters, spec, workers=workers, controller="autopilot", link=link, compute_s=0.02
    )


def gradients(step: int, workers: int = 4) -> list[dict[str, Tensor]]:
    """Returns gradients with heavy tails that differ between ranks."""

    def one(rank: int) -> Tensor:
        normal = torch.randn(64, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        return normal * normal.abs()

    return [{"w": one(rank), "b": torch.ones(8)} for rank in range(workers)]


def set_rate(run: Simulation, rate_bits: float) -> None:
    for runtime in runtimes_of(run):
        assert isinstance(runtime.clock, ModelClock)
        runtime.clock.link = LinkModel(1e-4, rate_bits)


def explained(run: Simulation) -> Mapping[str, Any]:
    return run.stats()["controller"]  # type: ignore[return-value]


def runtimes_of(run: Simulation) -> list[ControllerRuntime]:
    found = [worker.observer for worker in run.workers]
    assert all(isinstance(runtime, ControllerRuntime) for runtime in found)
    return found  # type: ignore[return-value]


def states_of(run: Simulation) -> list[AutopilotState]:
    found = [runtime.state for runtime in runtimes_of(run)]
    assert all(isinstance(state, AutopilotState) for state in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "dgc:ratio=0.05"])
def test_simulated_ranks_decide_the_same_and_follow_the_link(spec: str) -> None:
    run = simulation(spec)
    settings, progress = [], []
    for phase, rate_bits in enumerate((1e9, 1e6, 1e9)):
        set_rate(run, rate_bits)
        for step in range(30):
            run.step(gradients(100 * phase + step))
        settings.append(explained(run)["setting"])
        progress.append(explained(run)["settings"][settings[-1]]["worth"])
        assert len({str(state.indices) for state in states_of(run)}) == 1
    assert progress[1] < 0.9 < min(progress[0], progress[2])
    assert settings[1].startswith(spec.partition(":")[0])
    saved = [
        str({k: v for k, v in state.state_dict().items() if k != "local_errors"})
        for state in states_of(run)
    ]
    assert len(set(saved)) == 1


def test_randomk_needs_more_entries_than_topk() -> None:
    """Half of the entries make less progress than all in 16 bits, and are no shorter."""
    found = {}
    for method in ("topk", "randomk"):
        run = simulation(f"{method}:ratio=0.1")
        set_rate(run, 1e6)
        for step in range(60):
            run.step(gradients(step))
        found[method] = explained(run)
    assert found["randomk"]["setting"] == "randomk:ratio=0.05"
    assert found["topk"]["setting"] == "topk:ratio=0.01"
    settings = found["randomk"]["settings"]
    assert settings["randomk:ratio=0.5"]["worth"] < 0.9
    assert settings["randomk:ratio=0.5"]["step_ms"] >= settings["bf16"]["step_ms"]


@pytest.mark.parametrize("spec", ["powersgd:rank=4", "qsgd:bits=4", "topk:ratio=0.1 | qsgd:bits=4"])
def test_other_methods_are_controlled_too(spec: str) -> None:
    run = simulation(spec)
    for step in range(24):
        run.step(gradients(step))
    assert explained(run)["settings"]["dense"]["worth"] == 1
    assert len(explained(run)["settings"]) > 3
    assert all(math.isfinite(row["step_ms"]) for row in explained(run)["settings"].values())


def test_a_saved_run_resumes_to_the_bit() -> None:
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
    for old_runtime, new_runtime in zip(runtimes_of(first), runtimes_of(second), strict=True):
        vars(new_runtime.clock).update(
            {k: v for k, v in vars(old_runtime.clock).items() if k.startswith("_")}
        )
    for run in (first, second):
        set_rate(run, 1e9)
    for step in range(17, 60):
        one, other = first.step(gradients(step)), second.step(gradients(step))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert explained(first) == explained(second)
    assert len(explained(first)["decisions"]) > 2


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "acpsgd:rank=2"])
def test_a_run_that_currently_sends_dense_can_be_saved(spec: str) -> None:
    """Rank 2 was tried, then a higher one, whose warm start is kept while 16 bits are sent."""
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


def test_a_refused_state_changes_nothing() -> None:
    first, second = simulation("powersgd:rank=2"), simulation("powersgd:rank=2")
    for step in range(20):
        first.step(gradients(step))
    state = save(first.workers[0])
    state["lanes"]["b"]["memory"] = {"odd": torch.zeros(3)}  # type: ignore[index]
    before = save(second.workers[0])
    with pytest.raises(ConfigError, match="state of b"):
        load(second.workers[0], state)
    assert str(save(second.workers[0])) == str(before)


def test_another_world_size_starts_with_new_timings() -> None:
    few, many, fresh = simulation(workers=2), simulation(workers=8), simulation(workers=8)
    for step in range(20):
        few.step(gradients(step, 2))
    states = [save(worker) for worker in few.workers]
    for worker in many.workers:
        load_resized(worker, states, "fold")
    known = states_of(few)[0].cost_model.layers["w"].state_dict()
    assert all(state.cost_model.layers["w"].state_dict() == known for state in states_of(many))
    assert all(
        state.cost_model.times == states_of(fresh)[0].cost_model.times for state in states_of(many)
    )
    for step in range(40):
        many.step(gradients(step, 8))
    assert len({str(state.indices) for state in states_of(many)}) == 1
    assert states_of(many)[0].cost_model.times.sent_per_compressed_byte == pytest.approx(7, rel=0.1)


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "powersgd:rank=2", "qsgd:bits=4"])
def test_a_single_rank(spec: str) -> None:
    run = simulation(spec, workers=1)
    for step in range(80):
        run.step(gradients(step, 1))
    assert explained(run)["settings"]


def test_zero_gradients_are_no_samples_though_there_are_residuals() -> None:
    run = simulation()
    for step in range(20):
        run.step(gradients(step))
    errors = states_of(run)[0].cost_model.layers["w"].state_dict()
    for _ in range(40):
        run.step([{"w": torch.zeros(64, 256), "b": torch.zeros(8)} for _ in range(4)])
    assert states_of(run)[0].cost_model.layers["w"].state_dict() == errors


def test_skipped_steps_change_nothing() -> None:
    run = simulation()
    for step in range(20):
        run.step(gradients(step))
    before = states_of(run)[0].cost_model.state_dict()
    for _ in range(3):
        bad = gradients(0)
        bad[2]["w"][0, 0] = math.nan
        run.step(bad)
        assert states_of(run)[0].cost_model.state_dict() == before


def test_zero_gradients_are_no_samples_in_a_new_run() -> None:
    run = simulation()
    for _ in range(40):
        run.step([{"w": torch.zeros(64, 256), "b": torch.zeros(8)} for _ in range(4)])
    assert states_of(run)[0].cost_model.layers["w"].relative.errors == {}
    assert explained(run)["setting"] == "topk:ratio=0.01"
    for step in range(20):
        run.step(gradients(step))
    assert states_of(run)[0].cost_model.layers["w"].relative.errors


def test_a_switch_keeps_the_link_estimate() -> None:
    run = simulation()
    for step in range(20):
        run.step(gradients(step))
    fixed_s = states_of(run)[0].cost_model.times.fixed_s
    run.switch("randomk:ratio=0.1")
    assert states_of(run)[0].cost_model.times.fixed_s == fixed_s
    assert states_of(run)[0].cost_model.times.recent
    assert states_of(run)[0].cost_model.layers == {}
    assert explained(run)["setting"] == "randomk:ratio=0.1"
    assert explained(run)["decisions"][-1]["step"] == 20
    with pytest.raises(ConfigError, match="no factor"):
        run.switch("efsign")
    run.step(gradients(21))


def test_dense_steps_send_the_residuals() -> None:
    """Sent values plus residuals equal the gradients."""
    run = simulation()
    total, sent = torch.zeros(64, 256), torch.zeros(64, 256)
    for step in range(40):
        set_rate(run, 1e9 if step < 20 else 1e6)
        found = gradients(step)
        total += torch.stack([one["w"] for one in found]).mean(0)
        sent += run.step(found)["w"]
    left = torch.stack([worker.lanes["w"].memory_state["residual"] for worker in run.workers]).mean(
        0
    )
    # bf16 sums are rounded, and that error is in no residual.
    torch.testing.assert_close(sent + left.view(64, 256), total, rtol=0.02, atol=0.1)


def two_layers(step: int) -> list[dict[str, Tensor]]:
    """Returns a layer with few nonzero entries, and one whose entries are of similar size."""

    def one(rank: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(10 * step + rank)
        flat, peaks = torch.randn(2, 64, 256, generator=dice)
        return {"peaks": 10 * peaks * (torch.arange(256) % 100 == 0), "flat": flat}

    return [one(rank) for rank in range(4)]


def simulation_by(by: str) -> Simulation:
    tensors = {"peaks": torch.zeros(64, 256), "flat": torch.zeros(64, 256)}
    return gradwire.simulate(
        tensors,
        "topk:ratio=0.2",
        workers=4,
        controller=f"autopilot:by={by}",
        link=LinkModel(1e-4, 1e6),
        compute_s=0.02,
    )


def test_layers_get_settings_of_their_own() -> None:
    run, uniform = simulation_by("layer"), simulation_by("all")
    for step in range(120):
        run.step(two_layers(step))
        uniform.step(two_layers(step))
    explained_all, found = explained(uniform), explained(run)
    assert "layers" not in explained_all
    indices = states_of(run)[0].indices
    # A hundredth of the one is all of it; of the other, twice as much adds little.
    assert indices["peaks"] < indices["flat"]
    assert set(found["layers"]) == {"peaks", "flat"}
    assert ", " in found["setting"]
    assert len({str(state.indices) for state in states_of(run)}) == 1
    reasons = [decision["reason"] for decision in found["decisions"][1:]]
    assert all(reason.startswith("of 2 layers ") for reason in reasons)
    # No setting shared by all layers is predicted to be clearly better.
    cost_model = states_of(run)[0].cost_model
    here = cost_model.predict(indices)
    shared = [cost_model.predict(cost_model.uniform(i)) for i in range(len(cost_model.grid))]
    assert SWITCH_RATIO * here.cost_s < min(p.cost_s for p in shared if p.progress >= MIN_PROGRESS)


def test_settings_of_layers_do_not_oscillate() -> None:
    run = simulation_by("layer")
    for step in range(400):
        run.step(two_layers(step))
    late = [d for d in explained(run)["decisions"] if d["step"] > 200]
    assert len(late) <= 4


def test_a_layer_without_gradients_does_not_affect_others() -> None:
    run = simulation_by("layer")
    for step in range(60):
        grads = two_layers(step)
        for one in grads:
            one["flat"].zero_()
        run.step(grads)
    # It has no samples; the other layer is controlled as usual.
    assert states_of(run)[0].cost_model.layers["flat"].relative.errors == {}
    assert states_of(run)[0].cost_model.layers["peaks"].relative.errors
    assert explained(run)["layers"]["peaks"] == "topk:ratio=0.02"
