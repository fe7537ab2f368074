"""Delayed means: every step ends up in every model exactly once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from local_workers import (
    MakeOptimizer,
    Method,
    SimulatedRun,
    all_equal,
    largest,
    momentum_sgd,
    small_model,
    take_step,
    weights,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.errors import ConfigError
from gradwire.local import LocalSGD, QsparseLocalSGD

GAP = 4

both = pytest.mark.parametrize(
    ("method", "args"), [(LocalSGD, ()), (QsparseLocalSGD, ("none",))], ids=["local", "qsparse"]
)


def whole_numbers() -> nn.Module:
    """Returns a model whose sums and means over few workers are exact."""
    model = nn.Linear(5, 3, bias=False)
    model.weight.data.copy_(torch.arange(15).view(3, 5))
    return model


def unit_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1.0)


def whole_gradient(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-8, 9, (3, 5), generator=generator).float()


def step_along(
    run: SimulatedRun, step: int, gradient: Callable[[int, int], Tensor] = whole_gradient
) -> None:
    """Takes a step along gradients that do not depend on the models."""
    for rank, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
        parameter = next(model.parameters())
        parameter.grad = gradient(step, rank).to(parameter.dtype)
        optimizer.step()


@both
@pytest.mark.parametrize("ahead", [1, 0.5, 0.25])
@pytest.mark.parametrize("delay", [0, 1, 2, GAP - 1, GAP])
def test_no_step_is_lost_and_none_counts_twice(
    method: Method, args: tuple[Any, ...], delay: int, ahead: float
) -> None:
    """Applied steps are in the mean; of those in flight a worker has the fraction `ahead`."""
    share = ahead if delay else 1
    size, settings = 4, {"model": whole_numbers, "optimizer": unit_sgd, "ahead": share}
    with SimulatedRun(method, *args, size=size, sync_every=GAP, delay=delay, **settings) as run:
        for step in range(1, 4 * GAP + 1):
            step_along(run, step)
            applied, sent = max(0, (step - delay) // GAP * GAP), step // GAP * GAP
            common = next(whole_numbers().parameters()).detach()
            for past in range(1, applied + 1):
                common -= torch.stack([whole_gradient(past, rank) for rank in range(size)]).mean(0)
            for rank, model in enumerate(run.models):
                own = [whole_gradient(since, rank) for since in range(applied + 1, step + 1)]
                in_flight, unsent = own[: sent - applied], own[sent - applied :]
                zero = torch.zeros(3, 5)
                expected = common - share * sum(in_flight, zero) - sum(unsent, zero)
                assert torch.equal(next(model.parameters()).detach(), expected)


def by_definition(
    size: int, steps: int, gap: int, delay: int, ahead: float, ratio: float
) -> list[Tensor]:
    """Sends the top-k of residual plus a worker's steps since its last drift."""
    models = [small_model() for _ in range(size)]
    optimizers = [momentum_sgd(model) for model in models]
    places = range(len(list(models[0].parameters())))
    anchor = [p.detach().clone() for p in models[0].parameters()]
    residuals = [[torch.zeros_like(a) for a in anchor] for _ in range(size)]
    base = [[a.clone() for a in anchor] for _ in range(size)]
    captured = [[a.clone() for a in anchor] for _ in range(size)]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, optimizer, step, rank)
        now = [[p.detach() for p in model.parameters()] for model in models]
        if step > delay and (step - delay) % gap == 0:
            for rank in range(size):
                for place in places:
                    now[rank][place].add_(anchor[place] - captured[rank][place])
                    base[rank][place] = anchor[place].clone()
        if step % gap == 0:
            drifts = [
                [b - x for b, x in zip(*pair, strict=True)] for pair in zip(base, now, strict=True)
            ]
            for place in places:
                sent = []
                for rank in range(size):
                    now[rank][place].add_(drifts[rank][place], alpha=1 - ahead)
                    drift = residuals[rank][place] + drifts[rank][place]
                    sent.append(largest(drift, ratio))
                    residuals[rank][place] = drift - sent[-1]
                anchor[place] = anchor[place] - torch.stack(sent).mean(0)
            captured = [[x.clone() for x in own] for own in now]
    return [weights(model) for model in models]


@pytest.mark.parametrize("ahead", [1, 0.5])
@pytest.mark.parametrize("delay", [1, 3, GAP])
def test_matches_its_definition(delay: int, ahead: float) -> None:
    settings = {"sync_every": GAP, "delay": delay, "ahead": ahead, "optimizer": momentum_sgd}
    with SimulatedRun(QsparseLocalSGD, "topk:ratio=0.1,values=fp32", **settings) as run:
        for step in range(1, 4 * GAP + 3):
            run.step(step)
    expected = by_definition(3, 4 * GAP + 2, GAP, delay, ahead, 0.1)
    for ours, theirs in zip(run.weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def conv(form: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=form)


@both
@pytest.mark.parametrize("delay", [1, GAP])
def test_parameters_in_another_memory_format(
    method: Method, args: tuple[Any, ...], delay: int
) -> None:
    ends = []
    for form in (torch.contiguous_format, torch.channels_last):
        settings = {"sync_every": GAP, "delay": delay, "ahead": 0.5, "optimizer": unit_sgd}
        with SimulatedRun(method, *args, model=partial(conv, form), **settings) as run:
            for step in range(1, 3 * GAP + 1):
                step_along(run, step, partial(normal_gradient, (4, 3, 3, 3)))
            ends.append([next(model.parameters()).detach().clone() for model in run.models])
    for one, other in zip(*ends, strict=True):
        assert one.is_contiguous()
        assert not other.is_contiguous()
        assert torch.equal(one, other)


def normal_gradient(shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


@both
def test_one_worker_trains_as_without_the_method(method: Method, args: tuple[Any, ...]) -> None:
    settings = {"sync_every": GAP, "delay": GAP - 1, "optimizer": momentum_sgd, "size": 1}
    with SimulatedRun(method, *args, **settings) as run:
        run.train(3 * GAP)
    plain = small_model()
    optimizer = momentum_sgd(plain)
    for step in range(3 * GAP):
        take_step(plain, optimizer, step, 0)
    torch.testing.assert_close(run.weights()[0], weights(plain), rtol=1e-5, atol=1e-6)


def test_rounding_to_16_bits_is_not_part_of_the_drift() -> None:
    """Workers with zero gradients have no drift, though none is exactly at the anchor."""

    def half() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, 3, bias=False).to(torch.bfloat16)

    def rough(step: int, rank: int) -> Tensor:
        return whole_gradient(step, rank) / 300 if step <= GAP + 1 else torch.zeros(3, 5)

    settings = {"sync_every": GAP, "delay": 2, "optimizer": unit_sgd, "model": half}
    with SimulatedRun(LocalSGD, **settings) as run:
        seen = []
        for step in range(1, 5 * GAP):
            step_along(run, step, rough)
            if step % GAP == GAP - 1:
                seen.append(run.workers[0]._common()["weight"].clone())
        ends = run.weights()
    assert all_equal(ends)
    assert torch.equal(ends[0], seen[-1].to(torch.bfloat16).float())
    assert not torch.equal(ends[0], seen[-1])
    # The last non-zero gradients reach the anchor between the second and the third.
    assert not torch.equal(seen[1], seen[2])
    assert all(torch.equal(anchor, seen[2]) for anchor in seen[3:])


def test_error_feedback_applies_all_steps_in_the_end() -> None:
    """Models minus residuals equal the start minus all steps."""
    spec, settings = "topk:ratio=0.2,values=fp32", {"model": small_model, "optimizer": unit_sgd}
    with SimulatedRun(QsparseLocalSGD, spec, size=2, sync_every=GAP, delay=1, **settings) as run:
        start = next(small_model().parameters()).detach()
        total = torch.zeros_like(start)
        for step in range(1, 4 * GAP + 2):
            trains = step <= 4 * GAP
            for rank, optimizer in enumerate(run.optimizers):
                for parameter in run.models[rank].parameters():
                    generator = torch.Generator().manual_seed(100 * step + rank)
                    parameter.grad = trains * torch.randn(parameter.shape, generator=generator)
                total += next(run.models[rank].parameters()).grad / 2
                optimizer.step()
        residuals = [
            worker._engines()[0].lanes["0.weight"].memory_state["residual"]
            for worker in run.workers
        ]
    assert all_equal(run.weights())
    unsent = torch.stack(residuals).mean(0).view(start.shape)
    assert unsent.norm() > 0.1
    final = next(run.models[0].parameters()).detach()
    torch.testing.assert_close(final - unsent, start - total, rtol=1e-4, atol=1e-4)


def test_it_learns_as_well_as_without_delay() -> None:
    def final_loss(delay: int) -> float:
        settings = {"sync_every": 8, "delay": delay, "optimizer": momentum_sgd}
        with SimulatedRun(QsparseLocalSGD, "int4", **settings) as run:
            return sum(run.train(160)[-16:]) / 16

    assert final_loss(7) < 1.2 * final_loss(0)


@both
@pytest.mark.parametrize("delay", [GAP + 1, -1, 1.0, True])
def test_a_delay_out_of_range(method: Method, args: tuple[Any, ...], delay: object) -> None:
    rule = r"delay must be (a whole number, )?0 to 4, got"
    with pytest.raises(ConfigError, match=f"^{method.__name__}: {rule}"):
        SimulatedRun(method, *args, sync_every=GAP, delay=delay)


def test_a_state_of_another_delay() -> None:
    with SimulatedRun(LocalSGD, sync_every=GAP, delay=2, size=1) as run:
        run.train(GAP + 1)
    state = run.workers[0].state_dict()
    with pytest.raises(ConfigError, match="state: delay is 2, expected 0"):
        SimulatedRun(LocalSGD, sync_every=GAP, size=1).workers[0].load_state_dict(state)


@both
@pytest.mark.parametrize("ahead", [0, -0.5, 1.5, True, "half"])
def test_a_share_out_of_range(method: Method, args: tuple[Any, ...], ahead: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{method.__name__}: ahead must be in \(0, 1\], got"):
        SimulatedRun(method, *args, sync_every=GAP, delay=1, ahead=ahead)


@both
def test_ahead_needs_a_delay(method: Method, args: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"^{method.__name__}: ahead=0.5 needs a delay"):
        SimulatedRun(method, *args, sync_every=GAP, ahead=0.5)


def spread_on_a_parabola(optimizer: MakeOptimizer, gap: int, ahead: float) -> tuple[float, float]:
    """Returns the final distance of two workers, and of their mean from the minimum.

    Both minimise one parabola; only their first gradients differ.
    """
    settings = {"sync_every": gap, "delay": gap, "ahead": ahead, "size": 2}
    with SimulatedRun(LocalSGD, model=whole_numbers, optimizer=optimizer, **settings) as run:
        for step in range(1, 121):
            for rank, (model, own) in enumerate(zip(run.models, run.optimizers, strict=True)):
                [parameter] = model.parameters()
                parameter.grad = parameter.detach() + (step == 1) * (2 * rank - 1)
                own.step()
        first, second = run.weights()
    return float((first - second).abs().max()), float((first + second).abs().max() / 2)


@pytest.mark.parametrize(
    ("rate", "momentum", "gap", "ahead"),
    [(1.5, 0.0, 1, 0.5), (0.6, 0.9, 2, 0.6), (0.6, 0.9, 3, 0.6)],
)
def test_a_smaller_ahead_is_stable_at_the_rates_of_dense_training(
    rate: float, momentum: float, gap: int, ahead: float
) -> None:
    """Dense training is stable here, and so is the mean, but not the difference of workers."""

    def steep(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)

    apart, away = spread_on_a_parabola(steep, gap, ahead)
    assert apart < 1e-2
    assert away < 1e-2
    apart, away = spread_on_a_parabola(steep, gap, 1.0)
    assert apart > 1e3
    assert away < 1e-2 * apart
