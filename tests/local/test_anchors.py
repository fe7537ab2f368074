"""Anchors on the device, in host memory and in bfloat16: equal workers, rounding without drift."""

from typing import Any

import pytest
import torch
from local_workers import SimulatedRun, adam, all_equal, plain_sgd, small_model
from torch import nn
from torch.optim import SGD

from gradwire.errors import ConfigError
from gradwire.local import DiLoCo, MuLoCo, SparseLoCo, simulated
from gradwire.local.anchors import stochastically_rounded


def with_anchors(kind: str, **settings: Any) -> SimulatedRun:
    return SimulatedRun(DiLoCo, sync_every=4, optimizer=adam, anchors=kind, **settings)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}], ids=["whole", "streaming"])
def test_host_memory_changes_nothing(settings: dict[str, Any]) -> None:
    with with_anchors("host", **settings) as ours, with_anchors("device", **settings) as theirs:
        ours.train(13)
        theirs.train(13)
    assert all(map(torch.equal, ours.weights(), theirs.weights()))
    state = ours.workers[0].state_dict()
    # Both are the same format, so that either continues with the other's state.
    fresh = with_anchors("device", **settings)
    fresh.workers[0].load_state_dict(state)


def test_parameters_continue_from_the_rounded_anchor() -> None:
    with with_anchors("bf16") as run:
        started = run.weights()
        assert all_equal(started)
        run.train(8)
        ended = run.weights()
    assert all_equal(ended)
    for weights in (started[0], ended[0]):
        assert torch.equal(weights, weights.bfloat16().float())
    [worker, *_] = run.workers
    kinds = worker._tensors()
    assert all(t.dtype == torch.bfloat16 for k in ("anchor", "momentum") for t in kinds[k].values())
    assert any(bool(t.any()) for t in kinds["momentum"].values())


def test_parameters_that_do_not_move_stay() -> None:
    """Rounding is no part of the drift, so a sync without local steps changes nothing."""

    def still(model: nn.Module) -> SGD:
        return SGD(model.parameters(), lr=0.0)

    with SimulatedRun(DiLoCo, sync_every=1, optimizer=still, anchors="bf16") as run:
        before = run.weights()[0]
        run.train(3)
        assert torch.equal(run.weights()[0], before)
    nearest = [p.bfloat16().float().reshape(-1) for p in small_model().parameters()]
    assert torch.equal(before, torch.cat(nearest).detach())


def test_rounding_is_to_a_neighbour_and_unbiased() -> None:
    x = torch.tensor([1.0, 1.001, -1.003, 3e-5, -2.5e10, 0.0]).repeat(20000, 1)
    uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    found = stochastically_rounded(x, uniform)
    assert torch.equal(found, found.bfloat16().float())
    assert ((found - x).abs() < x.abs() * 2.0**-7 + 1e-12).all()
    bias = (found - x).mean(0).abs() / x[0].abs().clamp(min=1e-30)
    # Three standard deviations of a mean of 20,000 errors of at most half a step.
    assert (bias < 3 * 2.0**-8 / 20000**0.5).all()
    special = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(stochastically_rounded(special, torch.full((2,), 0.9)), special)
    assert stochastically_rounded(torch.tensor([torch.nan]), torch.zeros(1)).isnan().all()


def test_small_steps_are_not_lost() -> None:
    """Every sync moves an anchor of 1 by 1/4096, of which bfloat16 holds no less than 1/128."""
    model = nn.Linear(100, 40, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = SGD(model.parameters(), lr=2.0**-12)
    [worker] = simulated(1)
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "anchors": "bf16"}
    with DiLoCo(model, optimizer, sync_every=1, process_group=worker, **plain):  # type: ignore[arg-type]
        for _ in range(256):
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
    moved = model.weight.detach() - 1
    assert float(moved.mean()) == pytest.approx(256 / 4096, rel=0.05)


def test_training_in_bfloat16_ends_close_to_float32() -> None:
    def loss(kind: str) -> float:
        calm = {"outer_lr": 0.7, "outer_momentum": 0.3}
        with with_anchors(kind, **calm) as run:
            return sum(run.train(120)[-10:])

    assert loss("bf16") < 1.1 * loss("device")


@pytest.mark.parametrize("method", [DiLoCo, SparseLoCo, MuLoCo])
def test_unknown_places_are_refused(method: Any) -> None:
    text = r"anchors must be one of \['device', 'host', 'bf16'\], got 'disk'"
    with pytest.raises(ConfigError, match=f"{method.__name__}: {text}"):
        SimulatedRun(method, sync_every=4, optimizer=plain_sgd, anchors="disk")


def test_a_state_of_another_format_is_refused() -> None:
    with with_anchors("device") as run:
        state = run.workers[0].state_dict()
    with pytest.raises(ConfigError, match="state: "):
        with_anchors("bf16").workers[0].load_state_dict(state)
