"""Gradient tracking: the invariant, BEER's own recursion, and what is left without compression."""

import pytest
import torch
from quadratics import QuadraticRun, Quadratics, quadratic_run
from torch import Tensor

from gradwire.decentralized import BEER, CGT, DSGD, ChocoSGD
from gradwire.errors import ConfigError

WORKERS = 6
PROBLEM = Quadratics(WORKERS, largest=5.0, spread=3.0)


def trackers(run: QuadraticRun) -> Tensor:
    found = [worker._tensors()["tracker"]["x"] for worker in run.workers]
    return torch.stack(found)


def gradients(x: Tensor) -> Tensor:
    rows = x.view(PROBLEM.minima.shape)
    return (PROBLEM.curvatures * (rows - PROBLEM.minima)).view(x.shape)


@pytest.mark.parametrize("method", [CGT, BEER])
@pytest.mark.parametrize("compressor", ["topk:ratio=0.1", "efsign", "none"])
def test_the_mean_tracker_is_the_mean_gradient(method: type[CGT | BEER], compressor: str) -> None:
    with quadratic_run(PROBLEM, method, compressor, gamma=0.2, lr=0.02) as run:
        for _ in range(30):
            found = run.step()
            mean = torch.stack(found).mean(0).view(-1)
            assert (trackers(run).mean(0) - mean).abs().max() < 1e-10


def largest_differences(x: Tensor, count: int) -> Tensor:
    """Returns the largest entries of every row, in float32 as they are sent."""
    index = x.float().abs().topk(count, dim=1).indices
    values = x.float().gather(1, index).double()
    return torch.zeros_like(x).scatter_(1, index, values)


def test_beer_follows_its_own_recursion() -> None:
    """Sends C(X - H) after the step, as the paper does, and not before the next one."""
    gamma, lr, steps = 0.2, 0.02, 25
    with quadratic_run(PROBLEM, BEER, "topk:ratio=0.1,values=fp32", gamma=gamma, lr=lr) as run:
        for _ in range(steps):
            run.step()
    [weights] = run.workers[0].mixing.matrices
    laplacian = weights - torch.eye(WORKERS, dtype=torch.float64)
    x = torch.zeros(WORKERS, 1024, dtype=torch.float64)
    h, gradient = x.clone(), gradients(x)
    v = gradient.clone()
    g = largest_differences(v, 102)
    for _ in range(steps):
        x = x + gamma * laplacian @ h - lr * v
        h = h + largest_differences(x - h, 102)
        new = gradients(x)
        v = v + gamma * laplacian @ g + new - gradient
        g = g + largest_differences(v - g, 102)
        gradient = new
    torch.testing.assert_close(run.matrix(), x, rtol=1e-12, atol=1e-12)


def test_without_compression_it_is_gradient_tracking() -> None:
    lr, steps = 0.05, 20
    with quadratic_run(PROBLEM, CGT, "none", gamma=1.0, lr=lr) as run:
        for _ in range(steps):
            run.step()
    [weights] = run.workers[0].mixing.matrices
    x = torch.zeros(WORKERS, 1024, dtype=torch.float64)
    gradient = gradients(x)
    y = gradient.clone()
    for _ in range(steps):
        x = weights @ x - lr * y
        new = gradients(x)
        y = weights @ y + new - gradient
        gradient = new
    torch.testing.assert_close(run.matrix(), x, rtol=1e-13, atol=1e-13)


def test_choco_without_compression_is_dsgd_bit_for_bit() -> None:
    with quadratic_run(PROBLEM, ChocoSGD, "none", gamma=1.0, lr=0.05) as choco:
        for _ in range(10):
            choco.step()
    with quadratic_run(PROBLEM, DSGD, lr=0.05) as plain:
        for _ in range(10):
            plain.step()
    assert torch.equal(choco.matrix(), plain.matrix())
    x = torch.zeros(WORKERS, 1024, dtype=torch.float64)
    [weights] = plain.workers[0].mixing.matrices
    for _ in range(10):
        x = weights @ (x - 0.05 * gradients(x))
    torch.testing.assert_close(plain.matrix(), x, rtol=1e-13, atol=1e-13)


def test_damping_allows_an_expanding_quantiser() -> None:
    """A quantiser of one bit has a relative error above 1, which only damped copies bear."""
    expanding = "qsgd:bits=2"
    with pytest.raises(ConfigError, match="BEER: qsgd:bits=2 is needed as a contraction"):
        QuadraticRun(PROBLEM, BEER, expanding, gamma=0.1, lr=0.02)
    with pytest.raises(ConfigError, match="ChocoSGD: qsgd:bits=2 is needed as a contraction"):
        QuadraticRun(PROBLEM, ChocoSGD, expanding, gamma=0.1, lr=0.02)
    with quadratic_run(PROBLEM, CGT, expanding, gamma=0.05, alpha=0.1, lr=0.02) as run:
        start = run.error()
        for _ in range(200):
            run.step()
        assert run.error() < 0.5 * start


def test_gradients_that_are_missing_count_as_zero() -> None:
    with quadratic_run(PROBLEM, CGT, "none", gamma=1.0, lr=0.05) as run:
        run.step()
        for model, optimizer in zip(run.models, run.optimizers, strict=True):
            model.x.grad = None
            optimizer.step()
            assert model.x.grad is not None
        # What was tracked is taken back, so that the mean is zero again.
        assert trackers(run).mean(0).abs().max() < 1e-12


def test_a_closure_is_refused() -> None:
    with quadratic_run(PROBLEM, CGT, gamma=0.1, lr=0.05) as run:
        run.models[0].x.grad = torch.ones_like(run.models[0].x)
        with pytest.raises(ConfigError, match="CGT: a closure computes gradients inside the step"):
            run.optimizers[0].step(lambda: 0.0)
