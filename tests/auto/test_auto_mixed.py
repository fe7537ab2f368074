"""Methods for groups of parameters: a huge embedding beside many small matrices on a slow link."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.auto.calibration import Calibration
from gradwire.auto.groups import parameter_groups
from gradwire.auto.mixing import allocate
from gradwire.auto.step_model import StepModel
from gradwire.comm.cost_model import LinkModel
from gradwire.simulation import Simulation

WORKERS = 2
SLOW, FAST = LinkModel(1e-4, 1e7), LinkModel(1e-6, 1e13)
LAYERS = 8


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = {f"layers.{i}.weight": torch.zeros(48, 48) for i in range(LAYERS)}
    biases = {f"layers.{i}.bias": torch.zeros(48) for i in range(LAYERS)}
    return {"embed.weight": torch.zeros(2048, 48), **layers, **biases}


def gradients(step: int) -> list[dict[str, Tensor]]:
    """Returns gradients of low rank of the embedding, and of full rank of all else."""
    found = []
    left = torch.randn(2048, 1, generator=torch.Generator().manual_seed(1))
    for rank in range(WORKERS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        noise = {n: torch.randn(x.shape, generator=generator) for n, x in parameters().items()}
        right = torch.randn(1, 48, generator=generator)
        found.append({**noise, "embed.weight": left @ right + 0.01 * noise["embed.weight"]})
    return found


def simulation(spec: str, link: LinkModel, **options: Any) -> Simulation:
    return gradwire.simulate(
        parameters(), spec, workers=WORKERS, link=link, compute_s=0.05, **options
    )


def chosen(simulated: Simulation) -> Any:
    return simulated.stats()["controller"]


def trained(spec: str, link: LinkModel, steps: int, **options: Any) -> Simulation:
    simulated = simulation(spec, link, **options)
    for step in range(steps):
        simulated.step(gradients(step))
    return simulated


def wire_s(simulated: Simulation, first: int, steps: int) -> float:
    """Returns the time of a step on the slow link, by the bytes and calls of the meter."""
    meter = simulated.network.meters[0]
    before = meter.sent_bytes, meter.calls
    for step in range(first, first + steps):
        simulated.step(gradients(step))
    sent, calls = meter.sent_bytes - before[0], meter.calls - before[1]
    return (calls * SLOW.latency_s + 8 * sent / SLOW.rate_bits) / steps


def test_a_mixed_plan_is_faster_than_any_single_method_that_is_admitted() -> None:
    simulated = trained("auto:risk=low", SLOW, 55)
    found = chosen(simulated)
    mixed = next(row for row in found["candidates"] if row["spec"] == found["setting"])
    assert found["phase"] == "settled"
    assert found["setting"] == '"embed.weight": powersgd:rank=2; default: int4'
    assert mixed["admitted"]
    assert mixed["risk"] == "low"
    assert mixed["exchange"] == "mean and gather"
    own_s = wire_s(simulated, 60, 4)
    singles = [row for row in found["candidates"] if row is not mixed and row["admitted"]]
    assert {row["spec"] for row in singles} >= {"none", "int4"}
    for row in singles:
        static = gradwire.simulate(parameters(), row["spec"], workers=WORKERS)
        assert own_s < 0.7 * wire_s(static, 0, 4), row["spec"]
    # Its prediction is that of the link, for the bytes and calls that the meter has counted.
    exchanged_ms = mixed["predicted_ms"] - found["compute_ms"]
    assert exchanged_ms == pytest.approx(1e3 * own_s, rel=0.1)
    policies: Any = simulated.stats()["policies"]
    assert [(p["pattern"], p["compressed"]) for p in policies] == [
        ("embed.weight", 1),
        ("default", LAYERS),
    ]


def test_nothing_is_mixed_where_no_step_becomes_shorter() -> None:
    for link in (FAST, SLOW):
        rows = chosen(trained("auto:risk=low", link, 25))["candidates"]
        assert any(";" in row["spec"] for row in rows) == (link is SLOW)


def test_workers_of_a_mixed_plan_decide_the_same() -> None:
    simulated = simulation("auto:risk=low", SLOW)
    for step in range(50):
        simulated.step(gradients(step))
        found = [w.observer.stats() for w in simulated.workers if w.observer is not None]
        assert found[1:] == found[:-1]


def test_a_resumed_run_of_a_mixed_plan_is_bitwise() -> None:
    straight = trained("auto:risk=low", SLOW, 52)
    assert ";" in chosen(straight)["setting"]
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = simulation("auto:risk=low", SLOW)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert chosen(resumed) == chosen(straight)
    for step in range(52, 56):
        ours, theirs = straight.step(gradients(step)), resumed.step(gradients(step))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert chosen(resumed) == chosen(straight)


@pytest.mark.parametrize("plan", [None, [], [["int4"]], [["sign", "mean"]], "int4"])
def test_a_state_with_an_illegal_plan_is_refused(plan: object) -> None:
    observer = simulation("auto", SLOW).workers[0].observer
    assert observer is not None
    state: Any = observer.state_dict()
    with pytest.raises(gradwire.ConfigError):
        observer.adopt_plan({**state, "plan": plan})


def test_groups_are_told_apart_by_shape() -> None:
    tensors = {
        "wte": torch.zeros(4096, 64),
        "h.0.up": torch.zeros(1024, 256),
        "h.1.up": torch.zeros(1024, 256),
        "h.0.small": torch.zeros(32, 32),
        "h.0.bias": torch.zeros(70000),
        "head[1]": torch.zeros(512, 512),
    }
    found = {group.label: group for group in parameter_groups(tensors)}
    assert {label: group.names for label, group in found.items()} == {
        "embeddings": ("wte",),
        "large matrices": ("h.0.up", "h.1.up", "head[1]"),
        "rest": ("h.0.small", "h.0.bias"),
    }
    assert found["large matrices"].matches() == [
        ("h.*.up", ("h.0.up", "h.1.up")),
        ("head[[]*]", ("head[1]",)),
    ]
    [only] = parameter_groups({"bias": torch.zeros(9)})
    assert (only.label, only.names) == ("rest", ("bias",))


def test_a_pattern_matches_no_parameter_of_another_group() -> None:
    tensors = {"0.weight": torch.zeros(9000, 16), "2.weight": torch.zeros(16, 16)}
    [embeddings, _] = parameter_groups(tensors)
    assert embeddings.patterns == ("0.weight",)


def test_allocation_spends_error_only_where_it_saves_time() -> None:
    """Two groups: the first is a tenth of the bytes, and compressing it would save a hundredth."""
    dense = Calibration(0.0, 2.0, 1e6, 0.0, 1.0)
    fast = replace_bytes(dense, 1e4, error=0.5)
    model, link = StepModel(1.0, 1, overlaps=False), LinkModel(0.0, 8e6)
    calibrated = [[replace_bytes(dense, 1e4), dense], [replace_bytes(fast, 1e2), fast]]
    assert allocate(calibrated, [[0, 1], [0, 1]], model, link) == [0, 1]
    assert allocate(calibrated, [[0, 1], [0]], model, link) == [0, 0]
    # With communication during backward, a wire that is hidden needs no compression.
    hidden = replace(model, compute_s=100.0, buckets=100, overlaps=True)
    assert allocate(calibrated, [[0, 1], [0, 1]], hidden, link) == [0, 0]


def replace_bytes(part: Calibration, link_bytes: float, error: float = 0.0) -> Calibration:
    return part._replace(link_bytes=link_bytes, error=error or part.error)
