"""Local SGD, DiLoCo and SparseLoCo: by hand, compared with torch's SGD, in fragments."""

from typing import Any

import pytest
import torch
from local_workers import (
    SimulatedRun,
    adam,
    all_equal,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    weights,
)
from torch import Tensor, nn
from torch.optim import SGD

from gradwire.errors import ConfigError
from gradwire.local import DiLoCo, LocalSGD, SparseLoCo, simulated


def test_local_sgd_by_hand() -> None:
    """Two workers at 1 whose gradients are 1 and 3: after two steps of 0.1 they meet at 0.6."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        model.weight.data.fill_(1.0)
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    workers = [
        LocalSGD(model, own, sync_every=2, process_group=worker)
        for model, own, worker in zip(models, optimizers, simulated(2), strict=True)
    ]
    seen = []
    with workers[0], workers[1]:
        for _ in range(3):
            for model, own, grad in zip(models, optimizers, (1.0, 3.0), strict=True):
                model.weight.grad = torch.full((1, 1), grad)
                own.step()
            seen += [[float(model.weight.detach()) for model in models]]
    assert seen[0] == pytest.approx([0.9, 0.7])
    assert seen[1] == pytest.approx([0.6, 0.6])
    assert seen[2] == pytest.approx([0.5, 0.3])


def with_torch_sgd(size: int, steps: int, gap: int, outer: dict[str, Any]) -> Tensor:
    """Trains DiLoCo with torch's SGD for the outer step."""
    models = [small_model() for _ in range(size)]
    optimizers = [adam(model) for model in models]
    anchor = small_model()
    outer_optimizer = SGD(anchor.parameters(), **outer)
    for step in range(steps):
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, own, step, rank)
        if (step + 1) % gap == 0:
            for place, common in enumerate(anchor.parameters()):
                drifts = [common.detach() - list(m.parameters())[place].detach() for m in models]
                common.grad = torch.stack(drifts).mean(0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return weights(anchor)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ({"nesterov": False, "outer_lr": 0.3}, {"lr": 0.3, "momentum": 0.9}),
        ({"outer_momentum": 0.0, "outer_lr": 1.0}, {"lr": 1.0}),
    ],
    ids=["nesterov", "heavy ball", "plain"],
)
def test_outer_steps_match_torch_sgd(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    with SimulatedRun(DiLoCo, sync_every=5, optimizer=adam, **ours) as run:
        run.train(20)
    assert all_equal(run.weights())
    expected = with_torch_sgd(3, 20, 5, theirs)
    torch.testing.assert_close(run.weights()[0], expected, rtol=1e-4, atol=1e-6)


def test_plain_outer_steps_are_local_sgd() -> None:
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    with SimulatedRun(DiLoCo, sync_every=3, optimizer=momentum_sgd, **plain) as run:
        run.train(7)
    with SimulatedRun(LocalSGD, sync_every=3, optimizer=momentum_sgd) as other:
        other.train(7)
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), other.weights(), strict=True))


def parts_equal(run: SimulatedRun) -> tuple[bool, bool]:
    """Returns whether workers have the same first, and the same last layer."""
    layers = [[model[i].weight.detach() for model in run.models] for i in (0, 2)]
    return all_equal(layers[0]), all_equal(layers[1])


def test_fragments_are_synchronised_in_turn() -> None:
    with SimulatedRun(DiLoCo, sync_every=4, fragments=2) as run:
        seen = []
        for step in range(8):
            run.step(step)
            seen.append(parts_equal(run))
    none, first, last = (False, False), (True, False), (False, True)
    assert seen == [none, first, none, last] * 2
    stats = run.workers[0].stats()
    assert stats["syncs"] == 4
    assert stats["ratio"] == pytest.approx(4, rel=0.01)


def test_fragments_by_name() -> None:
    with SimulatedRun(DiLoCo, sync_every=2, fragments=[["2."], ["0.weight", "0.bias"]]) as run:
        run.step(0)
        assert parts_equal(run) == (False, True)
        run.step(1)
        assert parts_equal(run) == (True, False)


def test_a_delay_does_not_change_the_anchor() -> None:
    """With alpha=0 a worker loses the steps taken during the delay."""
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    with SimulatedRun(DiLoCo, sync_every=4, delay=2, alpha=0.0, **plain) as run:
        run.train(4)
        assert not all_equal(run.weights())
        run.train(1, first=4)
        assert not all_equal(run.weights())
        run.train(1, first=5)
        delayed = run.weights()
    with SimulatedRun(LocalSGD, sync_every=4) as other:
        other.train(4)
    assert all_equal(delayed)
    assert torch.equal(delayed[0], other.weights()[0])


def test_the_fraction_alpha_of_later_steps_stays() -> None:
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 4, "delay": 1}

    def after(alpha: float) -> list[Tensor]:
        with SimulatedRun(DiLoCo, alpha=alpha, **plain) as run:
            run.train(5)
        return run.weights()

    with SimulatedRun(LocalSGD, sync_every=100) as alone:
        alone.train(5)
    anchor = after(0.0)[0]
    for own, ours in zip(alone.weights(), after(0.25), strict=True):
        torch.testing.assert_close(ours, 0.75 * anchor + 0.25 * own)


def streamed(size: int, steps: int, gap: int, delay: int, alpha: float) -> list[Tensor]:
    """Trains Streaming DiLoCo of two layers by hand, with torch's SGD for each of them."""
    models = [small_model() for _ in range(size)]
    optimizers = [adam(model) for model in models]
    anchors = [[p.detach().clone() for p in small_model()[i].parameters()] for i in (0, 2)]
    outers = [SGD(own, lr=0.7, momentum=0.9, nesterov=True) for own in anchors]
    for step in range(1, steps + 1):
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, own, step, rank)
        for part, layer in enumerate((0, 2)):
            since = step - (part + 1) * gap // 2
            theirs = [list(model[layer].parameters()) for model in models]
            if since >= delay and (since - delay) % gap == 0:
                outers[part].step()
                for common, *each in zip(anchors[part], *theirs, strict=True):
                    for parameter in each:
                        mixed = (1 - alpha) * common + alpha * parameter.detach()
                        parameter.data.copy_(mixed)
            if since >= 0 and since % gap == 0:
                for common, *each in zip(anchors[part], *theirs, strict=True):
                    common.grad = torch.stack([common - p.detach() for p in each]).mean(0)
    return [weights(model) for model in models]


@pytest.mark.parametrize("delay", [1, 3, 5])
def test_streaming_matches_its_definition(delay: int) -> None:
    settings = {"sync_every": 6, "fragments": 2, "delay": delay, "alpha": 0.3}
    with SimulatedRun(DiLoCo, optimizer=adam, **settings) as run:
        for step in range(1, 27):
            run.step(step)
    expected = streamed(3, 26, 6, delay, 0.3)
    for ours, theirs in zip(run.weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sparseloco_sends_146_times_less_at_every_sync() -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(40, 32 * 128, bias=False)

    def idle(run: SimulatedRun) -> None:
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    with SimulatedRun(SparseLoCo, sync_every=1, model=wide) as run:
        idle(run)
        stats = run.workers[0].stats()
    assert wide().weight.nbytes / stats["message_bytes"] > 200  # type: ignore[operator]
    assert stats["planned_ratio"] > 200


def test_sparseloco_feeds_back_a_decaying_error() -> None:
    spec = "chunktopk:k=8,chunk=64,values=fp32"
    with SimulatedRun(SparseLoCo, spec, sync_every=1, size=1, outer_lr=0.5, decay=0.9) as run:
        [model] = run.models
        anchor = model[0].weight.detach().clone()
        error = torch.zeros_like(anchor)
        for step in range(3):
            alone = small_model()
            alone.load_state_dict(model.state_dict())
            take_step(alone, plain_sgd(alone), step, 0)
            error = 0.9 * error + anchor - alone[0].weight.detach()
            rows = error.view(-1, 64)
            sent = torch.zeros_like(rows)
            index = rows.abs().topk(8, dim=1).indices
            sent.scatter_(1, index, rows.gather(1, index))
            error = error - sent.view(error.shape)
            anchor = anchor - 0.5 * sent.view(error.shape)
            run.step(step)
            torch.testing.assert_close(model[0].weight.detach(), anchor, rtol=1e-5, atol=1e-6)


def test_training_reduces_the_loss() -> None:
    def final_loss(method: Any, *args: Any, **settings: Any) -> float:
        settings = {"sync_every": 5, **settings}
        with SimulatedRun(method, *args, size=2, optimizer=adam, **settings) as run:
            return sum(run.train(150)[-10:]) / 10

    local = final_loss(LocalSGD)
    assert local < 0.3
    # Thirty outer steps are few for a momentum of 0.9.
    calm = {"outer_lr": 0.7, "outer_momentum": 0.3}
    assert final_loss(DiLoCo, **calm) < 1.2 * local
    streaming = {"fragments": [["0."], ["2."]], "delay": 1, **calm, "sync_every": 6}
    assert final_loss(DiLoCo, "codebook:bits=8,spread=12", **streaming) < 1.5 * local
    assert final_loss(SparseLoCo, "chunktopk:k=8,chunk=64 | codebook") < 1.5 * local


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 5, "fragments": 2}, "sync_every 5 must be a multiple of 2 fragments"),
        (
            {"sync_every": 4, "fragments": 3},
            "fragments must be at most 2, the number of layers, got 3",
        ),
        ({"sync_every": 4, "fragments": 0}, "fragments must be at least 1, got 0"),
        ({"sync_every": 4, "fragments": [["0."]]}, "parameter '2.weight' matches 0 fragments"),
        ({"sync_every": 2, "fragments": [["0.", "2."], ["x"]]}, "a fragment matches no parameter"),
        ({"sync_every": 4, "delay": 5}, "delay must be 0 to 4, got 5"),
        ({"sync_every": 4, "alpha": 1.0}, r"alpha must be in \[0, 1\), got 1.0"),
        ({"sync_every": 4, "outer_lr": 0.0}, "outer_lr must be positive, got 0.0"),
        ({"sync_every": 4, "outer_lr": "fast"}, "outer_lr must be a number, got 'fast'"),
        ({"sync_every": 4, "outer_momentum": 1.0}, "outer_momentum must be in"),
        ({"sync_every": 4, "alpha": "half"}, r"alpha must be in \[0, 1\), got 'half'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^DiLoCo: {message}"):
        SimulatedRun(DiLoCo, **settings)
