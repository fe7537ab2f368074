"""Simulated workers in lock step: means, statistics, saved state, and refused arguments."""

import io
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.compressors.topk import TopK
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.simulation import Simulation
from gradwire.types import EncodeContext

SHAPES = {"weight": (40, 30), "bias": (40,)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def gradients(workers: int, step: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(workers)
    ]


def simulation(spec: str = "topk:ratio=0.05", workers: int = 3, seed: int = 0) -> Simulation:
    return gradwire.simulate(parameters(), spec, workers=workers, seed=seed)


def bits(means: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: mean.view(torch.int32).flatten().tolist() for name, mean in means.items()}


def test_without_compression_the_result_is_the_mean() -> None:
    given = gradients(4)
    means = simulation("none", 4).step(given)
    for name in SHAPES:
        torch.testing.assert_close(means[name], sum(g[name] for g in given) / 4)


def test_gradients_are_not_written_to() -> None:
    given, again = gradients(3), gradients(3)
    simulation().step(given)
    for one, two in zip(given, again, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in SHAPES)


def test_biases_are_exact_and_weights_are_sparse() -> None:
    given = gradients(3)
    means = simulation().step(given)
    torch.testing.assert_close(means["bias"], sum(g["bias"] for g in given) / 3)
    assert 0 < means["weight"].count_nonzero() <= 3 * 60


def test_a_model_gives_its_trainable_parameters() -> None:
    model = nn.Linear(64, 32)
    model.bias.requires_grad_(False)
    sim = gradwire.simulate(model, "efsign", workers=2)
    given = [{"weight": torch.ones(32, 64)}, {"weight": torch.full((32, 64), 3.0)}]
    assert torch.equal(sim.step(given)["weight"], torch.full((32, 64), 2.0))
    assert list(sim.workers[0].lanes) == ["weight"]


def test_some_of_the_parameters_may_take_part() -> None:
    sim = simulation("none", 2)
    means = sim.step([{"bias": torch.ones(40)}, {"bias": torch.zeros(40)}])
    assert means["bias"].tolist() == [0.5] * 40


def test_dtypes_are_kept() -> None:
    sim = gradwire.simulate(parameters(torch.bfloat16), "qsgd", workers=2)
    given = [{name: g.to(torch.bfloat16) for name, g in gradients(1)[0].items()}] * 2
    assert {mean.dtype for mean in sim.step(given).values()} == {torch.bfloat16}


def test_stats() -> None:
    sim = simulation("topk:ratio=0.05", 3)
    for step in range(2):
        sim.step(gradients(3, step))
    stats = sim.stats()
    # The last 4 bytes hold the non-finite flag.
    expected = gradwire.TopK(ratio=0.05).nbytes((40, 30)) + 4 * 40 + 4
    dense = 2 * 2 * (3 - 1) * 4 * (1200 + 40) // 3
    assert {key: stats[key] for key in ("spec", "memory", "exchange", "steps", "calls")} == {
        "spec": "topk:ratio=0.05",
        "memory": "residual",
        "exchange": "gather",
        "steps": 2,
        "calls": 2,
    }
    assert stats["message_bytes"] == 2 * expected
    assert stats["sent_bytes"] == stats["received_bytes"] == 2 * 2 * expected
    assert stats["dense_bytes"] == pytest.approx(dense, abs=2)
    assert stats["ratio"] == stats["dense_bytes"] / stats["sent_bytes"]
    assert 0 < stats["relative_error"] < 1
    norms = [worker.lanes["weight"].memory_state["residual"].norm() for worker in sim.workers]
    assert stats["residual_norm"] == pytest.approx(float(norms[0]))
    assert stats["backend"] in ("numba", "reference")
    assert {"encode_s", "wire_s", "decode_s"} <= stats.keys()


def test_stats_before_the_first_step() -> None:
    stats = simulation().stats()
    assert (stats["steps"], stats["sent_bytes"], stats["ratio"]) == (0, 0, 1.0)
    assert (stats["relative_error"], stats["residual_norm"]) == (0.0, 0.0)


def test_stats_after_zero_gradients_are_numbers() -> None:
    sim = simulation()
    sim.step([parameters() for _ in range(3)])
    assert sim.stats()["relative_error"] == 0.0


def test_one_worker_sends_nothing() -> None:
    sim = simulation("topk:ratio=0.05", 1)
    sim.step(gradients(1))
    assert sim.stats()["sent_bytes"] == 0
    assert sim.stats()["ratio"] == 1.0


def test_other_seeds_draw_other_numbers() -> None:
    same, again, other = (simulation("randomk:ratio=0.05", seed=seed) for seed in (1, 1, 2))
    given = gradients(3)
    first = bits(same.step(given))
    assert bits(again.step(given)) == first
    assert bits(other.step(given)) != first


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd", "randomk:ratio=0.1", "qsgd"])
def test_a_saved_state_resumes_bitwise(spec: str) -> None:
    sim = simulation(spec)
    for step in range(3):
        sim.step(gradients(3, step))
    file = io.BytesIO()
    torch.save(sim.state_dict(), file)
    file.seek(0)
    again = simulation(spec)
    again.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        given = gradients(3, step)
        assert bits(again.step(given)) == bits(sim.step(given))
    assert again.stats()["steps"] == 6


def test_a_state_is_a_copy() -> None:
    sim = simulation()
    sim.step(gradients(3))
    state = sim.state_dict()
    kept = state["0"]["lanes"]["weight"]["memory"]["residual"].clone()
    sim.step(gradients(3, 1))
    assert torch.equal(state["0"]["lanes"]["weight"]["memory"]["residual"], kept)
    sim.load_state_dict(state)
    sim.step(gradients(3, 1))
    assert torch.equal(state["0"]["lanes"]["weight"]["memory"]["residual"], kept)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: simulation("topk:ratio=0.1"),
            "state: compressor.ratio is 0.1, expected 0.05",
        ),
        (lambda: simulation(seed=1), "state: seed is 1, expected 0"),
        (lambda: simulation(workers=4), "state: size is 4, expected 3"),
        (lambda: simulation(workers=2), "state: size is 2, expected 3"),
        (
            lambda: gradwire.simulate(
                {"weight": torch.zeros(40, 30)}, "topk:ratio=0.05", workers=3
            ),
            "state: it has no parameter 'bias', which the model has",
        ),
        (
            lambda: gradwire.simulate(
                {"weight": torch.zeros(40, 40), "bias": torch.zeros(40)},
                "topk:ratio=0.05",
                workers=3,
            ),
            "state of weight: residual has the shape (1600,), expected (1200,)",
        ),
    ],
)
def test_a_state_of_another_set_up_is_refused(other, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        simulation().load_state_dict(other().state_dict())


def test_a_state_of_another_format_is_refused() -> None:
    state = simulation().state_dict()
    state["0"]["format"] = 99
    with pytest.raises(ConfigError, match="state: format is 99, expected 5"):
        simulation().load_state_dict(state)


def test_a_state_without_all_workers_is_refused() -> None:
    state = simulation().state_dict()
    del state["2"]
    with pytest.raises(ConfigError):
        simulation().load_state_dict(state)


def test_a_switch_logs_dropped_residuals(caplog: pytest.LogCaptureFixture) -> None:
    sim = simulation()
    sim.step(gradients(3))
    with caplog.at_level("INFO", "gradwire"):
        sim.switch("topk:ratio=0.1")
        assert not caplog.messages
        sim.switch("none")
    assert "switch: residuals of norm" in caplog.text


@pytest.mark.parametrize("workers", [0, -1])
def test_there_must_be_a_worker(workers: int) -> None:
    message = f"simulate: workers must be at least 1, got {workers}"
    with pytest.raises(ConfigError, match=message):
        simulation(workers=workers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 1.5}, "simulate: workers must be a whole number, at least 1, got 1.5"),
        ({"workers": "4"}, "simulate: workers must be a whole number, at least 1, got '4'"),
        ({"workers": None}, "simulate: workers must be a whole number, at least 1, got None"),
        ({"parameters": None}, "simulate: expected a module or tensors by name, got NoneType"),
        ({"parameters": {"w": 3}}, "simulate: parameter 'w' must be a tensor, got 3"),
        ({"link": "1gbit"}, "simulate: link must be a LinkModel, got '1gbit'"),
        ({"compute_s": -1}, "simulate: compute_s must be >= 0, got -1"),
        ({"compute_s": float("nan")}, "simulate: compute_s must be finite, got nan"),
        ({"compute_s": "1"}, "simulate: compute_s must be a number, got '1'"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    given = {"parameters": parameters(), "workers": 2, **settings}
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        gradwire.simulate(compressor="randomk:ratio=0.1", **given)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    simulation("randomk:ratio=0.05", seed=seed).step(gradients(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "step: expected a list with gradients of each worker, got NoneType"),
        ({"weight": 1}, "step: expected a list with gradients of each worker, got dict"),
        ([None] * 3, "worker 0: expected gradients by name, got NoneType"),
        ([*gradients(2), None], "worker 2: expected gradients by name, got NoneType"),
        (
            [{"weight": None}] * 3,
            "worker 0: gradient weight must be a tensor, got NoneType",
        ),
    ],
)
def test_invalid_gradients_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        simulation().step(given)


def test_every_worker_must_bring_gradients() -> None:
    with pytest.raises(ConfigError, match="2 gradients for 3 workers"):
        simulation().step(gradients(2))


@pytest.mark.parametrize(
    "make_wrong",
    [
        pytest.param(lambda g: g[1].pop("bias"), id="one is missing"),
        pytest.param(lambda g: g[1].update(other=torch.zeros(3)), id="one too many"),
        pytest.param(lambda g: [d.update(other=torch.zeros(3)) for d in g], id="unknown"),
        pytest.param(lambda g: [d.update(bias=torch.zeros(3)) for d in g], id="another shape"),
    ],
)
def test_gradients_must_be_those_of_the_parameters(make_wrong) -> None:
    given = gradients(3)
    make_wrong(given)
    with pytest.raises(ConfigError):
        simulation("none").step(given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, True, "x"])
@pytest.mark.parametrize("controller", [None, "accordion:low=0.5,high=0.1"])
def test_an_invalid_learning_rate_or_loss_scale_is_refused(
    bad: Any, controller: str | None
) -> None:
    run = gradwire.simulate(parameters(), "topk:ratio=0.05", workers=2, controller=controller)
    with pytest.raises(ConfigError, match="epoch_ended: learning_rate must be "):
        run.epoch_ended(bad)
    for before, after in ((bad, 0.1), (0.1, bad)):
        with pytest.raises(ConfigError, match=r"must be (a number|finite|positive), got "):
            run.workers[0].learning_rate_changed(before, after)
    with pytest.raises(ConfigError, match=r"must be (a number|finite|positive), got "):
        run.workers[0].loss_scale_changed(bad)


@pytest.mark.parametrize("controller", ["accordion:low=0.5,high=0.1", "autopilot"])
def test_a_learning_rate_may_end_at_zero_and_be_a_tensor(controller: str) -> None:
    run = gradwire.simulate(parameters(), "topk:ratio=0.05", workers=2, controller=controller)
    for rate in (0.1, torch.tensor(0.05), 0, 0):
        run.step(gradients(2))
        run.epoch_ended(rate)  # type: ignore[arg-type]
    other = gradwire.simulate(parameters(), "topk:ratio=0.05", workers=2, controller=controller)
    other.load_state_dict(run.state_dict())  # type: ignore[arg-type]
    assert bits(other.step(gradients(2))) == bits(run.step(gradients(2)))


@pytest.mark.parametrize("nothing", [{}, torch.nn.ReLU()])
def test_there_must_be_a_parameter(nothing: Any) -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        gradwire.simulate(nothing, "efsign", workers=2)


def test_a_parameter_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'w' is torch\.float64"):
        gradwire.simulate({"w": torch.zeros(64, 64, dtype=torch.float64)}, "efsign", workers=2)


def test_many_workers() -> None:
    sim = gradwire.simulate({"w": torch.zeros(64, 64)}, "efsign", workers=128, exchange="sharded")
    mean = sim.step([{"w": torch.full((64, 64), float(rank))} for rank in range(128)])["w"]
    torch.testing.assert_close(mean, torch.full((64, 64), 63.5))


class _AllWantMean(Engine):
    """An engine that computes the mean on every rank."""

    def __init__(self, *args: Any, **named: Any) -> None:
        Engine.__init__(self, *args, **{**named, "wants_mean": True})


@pytest.mark.parametrize(
    ("spec", "memory", "exchange"),
    [
        ("topk:ratio=0.05", "residual", "gather"),
        ("topk:ratio=0.05", "ef21", "gather"),
        ("topk:ratio=0.05", "momentum", "gather:aggregate=median"),
        ("topk:ratio=0.05", "residual", "sharded"),
        ("efsign", "residual", "hierarchical:node=2,between=gather"),
        ("dgc:ratio=0.05 | qsgd:bits=4", "residual", "gather"),
    ],
)
def test_only_one_simulated_rank_computes_the_mean(
    monkeypatch: pytest.MonkeyPatch, spec: str, memory: str, exchange: str
) -> None:
    def run() -> tuple[list[dict[str, list[int]]], bytes]:
        made = gradwire.simulate(parameters(), spec, workers=4, memory=memory, exchange=exchange)
        means = [bits(made.step(gradients(4, step))) for step in range(4)]
        saved = io.BytesIO()
        torch.save(made.state_dict(), saved)
        return means, saved.getvalue()

    expected = run()
    monkeypatch.setattr(sys.modules[Simulation.__module__], "Engine", _AllWantMean)
    assert run() == expected


def test_ranks_that_do_not_need_the_mean_do_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding_ranks: list[int] = []
    decode_add = TopK.decode_add

    def recorded(
        method: TopK, out: Tensor, messages: Any, weight: float, ctx: EncodeContext
    ) -> None:
        decoding_ranks.append(ctx.rank)
        decode_add(method, out, messages, weight, ctx)

    monkeypatch.setattr(TopK, "decode_add", recorded)
    made = simulation(workers=3)
    made.step(gradients(3))
    assert set(decoding_ranks) == {0}
    made.switch("topk:ratio=0.1", memory="ef21")
    made.step(gradients(3))
    assert set(decoding_ranks) == {0, 1, 2}
