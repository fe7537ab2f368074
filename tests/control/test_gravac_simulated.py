"""GraVAC's runs on simulated ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.state import load_resized, save
from gradwire.compressors.randomk import RandomK
from gradwire.compressors.topk import TopK
from gradwire.control.gravac import GraVAC, GraVACState
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.two_level import (
    GainMeter,
    MeasuredDense,
    TwoLevelSparsifier,
    two_level,
    with_factor,
)
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext

SPARSIFIERS = ["topk", "dgc", "redsync", "randomk", "sidco"]


def gradients(step: int, workers: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"w": (64, 80), "v": (50, 60), "b": (40,)}
    return [
        {n: torch.randn(s, generator=generator) ** 3 for n, s in shapes.items()}
        for _ in range(workers)
    ]


def run_of(spec: str, controller: str, **options: object) -> gradwire.Simulation:
    tensors = {name: torch.zeros_like(g) for name, g in gradients(0)[0].items()}
    return gradwire.simulate(tensors, spec, workers=4, controller=controller, **options)  # type: ignore[arg-type]


def states_of(run: gradwire.Simulation) -> list[GraVACState]:
    runtimes = [w.observer for w in run.workers]
    found = [r.state for r in runtimes if isinstance(r, ControllerRuntime)]
    return [state for state in found if isinstance(state, GraVACState)]


def test_the_top_of_the_top_is_the_top() -> None:
    run = run_of("topk:ratio=0.5,values=fp32", "gravac:low=4,high=16,epsilon=0.01,window=100")
    plain = gradwire.simulate(
        {n: torch.zeros_like(g) for n, g in gradients(0)[0].items()},
        "topk:ratio=0.125,values=fp32",
        workers=4,
    )
    run.step(gradients(0))  # dense, so that both start with no residual
    for step in range(1, 4):
        assert torch.equal(run.step(gradients(step))["w"], plain.step(gradients(step))["w"])
    assert states_of(run)[0].factor() == 8


def selections(candidate_only: bool, sends: str) -> list[int]:
    """Returns the number of entries that each selection of one step reads."""
    sizes: list[int] = []

    @dataclass(frozen=True)
    class Counting(TopK):
        def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
            sizes.append(ctx.numel)
            return TopK.select(self, ef, ctx)

    gain_meter = GainMeter(raw=False)
    gain_meter.start()
    levels = two_level(Counting(ratio=0.1), 10, 100, sends, candidate_only, gain_meter)  # type: ignore[arg-type]
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert isinstance(levels, TwoLevelSparsifier)
    levels.select(EFInput(x), EncodeContext((5000,), 0, 1, 0, 0))
    return sizes


def test_the_second_level_selects_among_the_first_and_an_unused_level_is_not_computed() -> None:
    assert selections(candidate_only=False, sends="candidate") == [5000, 500]
    assert selections(candidate_only=False, sends="floor") == [5000, 500]
    # Once the search has ended there is one selection, from the whole gradient.
    assert selections(candidate_only=True, sends="candidate") == [5000]


def test_random_k_of_random_k_is_random_k_in_distribution() -> None:
    """All entries have the same probability, and the second level is a subset of the first."""
    base, draws = RandomK(ratio=0.25), 2000
    counts = torch.zeros(64)
    for draw in range(draws):
        gain_meter = GainMeter(raw=False)
        levels = two_level(base, 4, 16, "candidate", False, gain_meter)
        assert isinstance(levels, TwoLevelSparsifier)
        ctx = EncodeContext((64,), 0, 1, draw, 7)
        index = levels.select(EFInput(torch.randn(64)), ctx)
        first = with_factor(base, 4).select(EFInput(torch.zeros(64)), ctx)
        assert set(index.tolist()) <= set(first.tolist())
        assert index.unique().numel() == 4
        counts[index] += 1
    # Each of 64 is drawn with probability 1/16, so 125 times; 5 standard deviations are 54.
    assert (counts - draws / 16).abs().max() < 54


@pytest.mark.parametrize("exchange", ["auto", "gather", "sharded", "hierarchical:node=2"])
@pytest.mark.parametrize("spec", [*SPARSIFIERS, "topk:ratio=0.1 | qsgd:bits=8,scaled=true"])
def test_sent_values_plus_residuals_equal_the_gradients(spec: str, exchange: str) -> None:
    spec = spec if "|" in spec else f"{spec}:ratio=0.1"
    # A third of all entries at random is a third of the squares: a gain of 0.577.
    epsilon = 0.5 if spec.startswith("randomk") else 0.6
    controller = f"gravac:low=3,high=100,epsilon={epsilon},window=2,policy=geometric"
    run = run_of(spec, controller, exchange=exchange)
    ef = torch.zeros(64 * 80)
    got = torch.zeros(64 * 80)
    sent = set()
    for step in range(10):
        sent.add(states_of(run)[0].factor())
        grads = gradients(step)
        ef += torch.stack([g["w"].view(-1) for g in grads]).mean(0)
        got += run.step(grads)["w"].view(-1)
        states = [state.state_dict() for state in states_of(run)]
        assert all(state == states[0] for state in states)
    assert len(sent) > 1
    left = torch.stack([w.lanes["w"].memory_state["residual"] for w in run.workers]).mean(0)
    if exchange == "sharded":
        left += torch.cat([w.lanes["w"].aggregator_state["server"] for w in run.workers])
    torch.testing.assert_close(got + left, ef, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("memory", ["momentum", "none", "ef21", "lowbit"])
def test_other_memories_than_the_residual(memory: str) -> None:
    run = run_of("dgc:ratio=0.1", "gravac:low=3,high=100,epsilon=0.5,window=2", memory=memory)
    for step in range(4):
        assert run.step(gradients(step))["w"].isfinite().all()
    assert states_of(run)[0].search.measured_steps == 4
    assert states_of(run)[0].factor() > 1


def test_a_dense_step_leaves_no_residual() -> None:
    run = run_of("topk:ratio=0.1", "gravac:low=10,high=1000,epsilon=1,window=5")
    for step in range(3):
        run.step(gradients(step))
        assert run.stats()["residual_norm"] == 0
    assert isinstance(run.workers[0].lanes["w"].compressor, MeasuredDense)


@pytest.mark.parametrize("norm", ["l2sq", "l2", "layer_l2"])
@pytest.mark.parametrize("ref", ["ef", "raw"])
def test_gains_are_those_of_all_ranks_and_layers(norm: str, ref: str) -> None:
    controller = (
        f"gravac:low=4,high=16,epsilon=0.1,window=100,gain_norm={norm},gain_ref={ref},alpha=1"
    )
    run = run_of("topk:ratio=0.5,values=fp32", controller)
    for step in range(2):
        run.step(gradients(step))
    left = [{n: w.lanes[n].memory_state["residual"] for n in "wv"} for w in run.workers]
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
    assert states_of(run)[0].search.floor_gain == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        ("dgc:ratio=0.1", {}, "inf"),
        # Non-finite values are not detected here.
        ("topk:ratio=0.1", {"nan_policy": "ignore", "memory": "none"}, "nan"),
    ],
)
def test_nonfinite_gradients_change_nothing(spec: str, options: dict[str, Any], value: str) -> None:
    run = run_of(spec, "gravac:low=3,high=100,epsilon=0.5,window=2", **options)
    for step in range(3):
        run.step(gradients(step))
    before = states_of(run)[0].state_dict()
    nonfinite = gradients(3)
    nonfinite[2]["v"][0, 0] = float(value)
    run.step(nonfinite)
    assert states_of(run)[0].state_dict() == {**before, "last_factor": None}


def test_zero_gradients_change_nothing_in_a_new_run() -> None:
    fresh = run_of("dgc:ratio=0.1", "gravac:low=3,high=100")
    zero = [{n: torch.zeros_like(g) for n, g in one.items()} for one in gradients(0)]
    fresh.step(zero)
    assert states_of(fresh)[0].search.measured_steps == 0


@pytest.mark.parametrize("ref", ["ef", "raw"])
def test_zero_gradients_change_nothing_though_there_are_residuals(ref: str) -> None:
    run = run_of("topk:ratio=0.1", f"gravac:low=3,high=100,epsilon=0.5,window=2,gain_ref={ref}")
    for step in range(3):
        run.step(gradients(step))
    before = states_of(run)[0].state_dict()
    assert run.workers[0].lanes["w"].memory_state["residual"].any()
    run.step([{n: torch.zeros_like(g) for n, g in one.items()} for one in gradients(3)])
    assert states_of(run)[0].state_dict() == {**before, "last_factor": None}


@pytest.mark.parametrize("exchange", ["leader", "hierarchical:node=2,between=leader"])
def test_ranks_other_than_the_leader_measure_too(exchange: str) -> None:
    run = run_of("topk:ratio=0.1", "gravac:low=3,high=100,epsilon=0.5,window=2", exchange=exchange)
    for step in range(6):
        run.step(gradients(step))
    assert [state.state_dict() for state in states_of(run)] == 4 * [states_of(run)[0].state_dict()]
    assert states_of(run)[0].search.measured_steps == 6


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_continues_with_another_world_size(size: int) -> None:
    controller = "gravac:low=3,high=100,epsilon=0.5,window=2"
    run = run_of("topk:ratio=0.1", controller)
    for step in range(5):
        run.step(gradients(step))
    states = [save(worker) for worker in run.workers]
    tensors = {name: torch.zeros_like(g) for name, g in gradients(0)[0].items()}
    other = gradwire.simulate(tensors, "topk:ratio=0.1", workers=size, controller=controller)
    for worker in other.workers:
        load_resized(worker, states, "redistribute")
    # Gains stay valid; the duration of steps is unknown.
    known = {**states_of(run)[0].state_dict(), "throughput": {}, "last_factor": None}
    assert [state.state_dict() for state in states_of(other)] == size * [known]
    other.step(gradients(5, size))
    assert {state.search.measured_steps for state in states_of(other)} == {6}


def test_statistics_are_piggybacked_on_messages() -> None:
    plain = run_of("topk:ratio=0.1", "schedule:last=0.1", exchange="gather")
    controlled = run_of("topk:ratio=0.1", "gravac:low=10,high=20,epsilon=0.01", exchange="gather")
    calls = []
    for run in (plain, controlled):
        for step in range(2):
            run.step(gradients(step))
        before = run.network.meters[0].calls
        run.step(gradients(2))
        calls.append(run.network.meters[0].calls - before)
    assert calls == [1, 1]


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "randomk:ratio=0.1"])
def test_resumes_to_the_bit(spec: str) -> None:
    controller = "gravac:low=2,high=64,epsilon=0.55,window=3,policy=geometric"
    whole = run_of(spec, controller)
    outs = [whole.step(gradients(step))["w"] for step in range(12)]
    first, second = run_of(spec, controller), run_of(spec, controller)
    for step in range(7):
        first.step(gradients(step))
    second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
    for step in range(7, 12):
        assert torch.equal(second.step(gradients(step))["w"], outs[step])
    assert second.stats()["controller"] == whole.stats()["controller"]


def test_switch_restarts_the_search_and_logs_it() -> None:
    run = run_of("topk:ratio=0.1", "gravac:low=3,high=100,epsilon=0.2,window=50")
    for step in range(3):
        run.step(gradients(step))
    residual = run.workers[1].lanes["w"].memory_state["residual"].clone()
    run.switch("redsync:ratio=0.1")
    assert states_of(run)[0].log.decisions[-1] == (3, "dense", "no gain has been measured yet")
    assert states_of(run)[0].search.measured_steps == 0
    assert torch.equal(run.workers[1].lanes["w"].memory_state["residual"], residual)
    run.step(gradients(3))
    assert states_of(run)[0].search.measured_steps == 1


BAD = {
    "gravac:low=10,high=10": "1 < low < high",
    "gravac:low=100,high=10": "1 < low < high",
    "gravac:low=0.5": "1 < low < high",
    "gravac:high=inf": "high must be finite, got inf",
    "gravac:low=nan": "low must be finite, got nan",
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


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="gravac: low must be a number, got '10'"):
        GraVAC(low="10")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gravac: high must be a number, got None"):
        GraVAC(high=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gravac: alpha must be a number, got False"):
        GraVAC(alpha=False)
    with pytest.raises(ConfigError, match="gravac: window must be a whole number, at least 1, got"):
        GraVAC(window=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["efsign", "powersgd:rank=2", "threshold:value=0.1", "none"])
def test_a_compressor_without_a_factor(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"gravac: .* has no factor"):
        run_of(spec, "gravac")
