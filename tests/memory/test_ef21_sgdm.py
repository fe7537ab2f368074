"""EF21 with momentum: a running mean, sent as differences."""

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.memory.ef21_sgdm import EF21SGDM
from gradwire.spec import parse_memory
from lockstep import Lockstep, distance_after, noise


def test_running_mean_by_hand() -> None:
    """Everything is sent, so the result is v: 8, then 8 + (0 - 8)/4 = 6, then 6 + (2 - 6)/4 = 5."""
    workers = Lockstep("topk:ratio=1,values=fp32", "ef21-sgdm:eta=0.25", "gather", 1, size=1)
    assert [float(workers.step(torch.tensor([g]))) for g in (8.0, 0.0, 2.0)] == [8.0, 6.0, 5.0]


def test_starts_at_the_first_gradient_that_is_not_zero() -> None:
    workers = Lockstep("topk:ratio=1,values=fp32", "ef21-sgdm", "gather", 2, size=1)
    assert workers.step(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert workers.step(torch.tensor([3.0, 0.0])).tolist() == [3.0, 0.0]


def test_with_eta_one_it_is_ef21() -> None:
    with_momentum = Lockstep("topk:ratio=0.1", "ef21-sgdm:eta=1", "gather", 300, size=3)
    without = Lockstep("topk:ratio=0.1", "ef21", "gather", 300, size=3)
    for step in range(20):
        grads = noise(3, 300, seed=step)
        assert torch.equal(with_momentum.step(*grads), without.step(*grads))


def test_comes_to_a_constant_gradient() -> None:
    workers = Lockstep("topk:ratio=0.1", "ef21-sgdm", "gather", 500, size=3)
    grads = noise(3, 500)
    for _ in range(60):
        out = workers.step(*grads)
    torch.testing.assert_close(out, grads.mean(dim=0), rtol=1e-3, atol=1e-3)


def test_the_common_sum_is_the_mean_of_the_workers_sums() -> None:
    workers = Lockstep("topk:ratio=0.05", "ef21-sgdm", "gather", 1000, size=4)
    for step in range(200):
        workers.step(*noise(4, 1000, seed=step))
    own, mean = workers.stacked_state("own"), workers.stacked_state("mean")
    assert all(torch.equal(row, mean[0]) for row in mean)
    assert (own.double().mean(dim=0) - mean[0].double()).abs().max() < 1e-6


def test_workers_that_differ_reach_the_common_optimum() -> None:
    pulls = 100 * noise(4, 10, seed=2)
    optima = pulls - pulls.mean(dim=0) + noise(10, seed=3)
    workers = Lockstep("topk:ratio=0.1,values=fp32", "ef21-sgdm", "gather", 10, size=4)
    assert distance_after(workers, optima, 300, rate=0.05) < 1e-3


def test_noise_of_small_batches_matters_less_than_to_ef21() -> None:
    """The paper's claim: mean squared error of the estimate, with noise of 10 times the signal."""
    signal = noise(200, seed=9)
    errors = {}
    for memory in ("ef21", "ef21-sgdm:eta=0.02"):
        workers = Lockstep("topk:ratio=0.1", memory, "gather", 200, size=4)
        outs = [workers.step(*(signal + 10 * noise(4, 200, seed=step))) for step in range(300)]
        errors[memory] = float((torch.stack(outs[150:]) - signal).square().mean())
    assert errors["ef21-sgdm:eta=0.02"] < errors["ef21"] / 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_gradient_shows_and_is_over(bad: float) -> None:
    workers = Lockstep("topk:ratio=0.1", "ef21-sgdm", "gather", 40, size=2)
    grads = noise(2, 40)
    workers.step(*grads)
    spoilt = grads.clone()
    spoilt[1, 7] = bad
    assert not workers.step(*spoilt).isfinite().all()
    for key in ("momentum", "own", "mean"):
        assert workers.stacked_state(key).isfinite().all()
    for _ in range(200):
        out = workers.step(*grads)
    torch.testing.assert_close(out, grads.mean(dim=0), rtol=1e-3, atol=1e-3)


def test_another_learning_rate_changes_nothing() -> None:
    state = {key: torch.ones(3) for key in ("momentum", "own", "mean")}
    EF21SGDM().rescale(state, 0.1)
    assert all(torch.equal(tensor, torch.ones(3)) for tensor in state.values())


@pytest.mark.parametrize("eta", [0, 1.5, -0.1])
def test_eta_must_be_a_fraction(eta: float) -> None:
    with pytest.raises(ConfigError, match=r"ef21-sgdm: eta must be in \(0, 1\], got "):
        parse_memory(f"ef21-sgdm:eta={eta}")
