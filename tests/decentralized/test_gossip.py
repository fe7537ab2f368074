"""Gossip alone, without gradients: the mean stays, and workers meet at it."""

import pytest
import torch
from quadratics import SHAPE, QuadraticRun, Quadratics, quadratic_run
from torch import Tensor

from gradwire.decentralized import DSGD, ChocoSGD
from gradwire.decentralized.mixing import Mixing

WORKERS = 8


def start_apart(run: QuadraticRun) -> Tensor:
    """Moves the workers apart; returns their mean."""
    generator = torch.Generator().manual_seed(1)
    for model in run.models:
        model.x.data.copy_(torch.randn(SHAPE, generator=generator, dtype=torch.float64))
    return run.matrix().mean(0)


def gossip(run: QuadraticRun, steps: int) -> None:
    for _ in range(steps):
        for model, optimizer in zip(run.models, run.optimizers, strict=True):
            model.x.grad = torch.zeros_like(model.x)
            optimizer.step()


@pytest.mark.parametrize(
    ("compressor", "gamma"),
    [
        ("topk:ratio=0.1", 0.1),
        ("topk:ratio=0.1", 0.4),
        ("efsign", 0.1),
        ("int4", 0.5),
        ("threshold:value=0.05", 0.3),
        ("none", 1.0),
    ],
)
@pytest.mark.parametrize("topology", ["ring", "star", "exponential"])
def test_the_mean_of_all_workers_stays(compressor: str, gamma: float, topology: str) -> None:
    settings = {"gamma": gamma, "topology": topology, "lr": 0.1}
    with quadratic_run(Quadratics(WORKERS), ChocoSGD, compressor, **settings) as run:
        mean = start_apart(run)
        before = (run.matrix() - mean).norm()
        for _ in range(4):
            gossip(run, 5)
            torch.testing.assert_close(run.matrix().mean(0), mean, rtol=0, atol=1e-12)
        assert (run.matrix() - mean).norm() < before


def test_workers_meet_at_the_mean_through_sparse_messages() -> None:
    compressor = "topk:ratio=0.1,values=fp32"
    settings = {"gamma": 0.2, "topology": "torus", "lr": 0.1}
    with quadratic_run(Quadratics(WORKERS), ChocoSGD, compressor, **settings) as run:
        mean = start_apart(run)
        gossip(run, 150)
        torch.testing.assert_close(run.matrix(), mean.expand(WORKERS, -1), rtol=0, atol=1e-6)
        stats = run.workers[0].stats()
    assert stats["neighbor_distance"] < 1e-4


def test_mixed_copies_are_the_weighted_sums_of_all_copies() -> None:
    with quadratic_run(Quadratics(WORKERS), ChocoSGD, "topk:ratio=0.1", gamma=0.2, lr=0.05) as run:
        start_apart(run)
        for _ in range(20):
            run.step()
        tensors = [worker._tensors() for worker in run.workers]
    own = torch.stack([kinds["own"]["x"] for kinds in tensors])
    mixed = torch.stack([kinds["mixed"]["x"] for kinds in tensors])
    [weights] = Mixing(run.workers[0].mixing.topology, WORKERS).matrices
    torch.testing.assert_close(mixed, weights @ own, rtol=0, atol=1e-12)


def test_one_peer_steps_reach_the_mean() -> None:
    with quadratic_run(Quadratics(WORKERS), DSGD, topology="one_peer", lr=0.1) as run:
        mean = start_apart(run)
        gossip(run, 3)
        torch.testing.assert_close(run.matrix(), mean.expand(WORKERS, -1), rtol=0, atol=1e-14)
        stats = run.workers[0].stats()
    # One message of 8 bytes an entry, and one byte that it is finite, padded to 4.
    assert stats["sent_bytes"] == 3 * (8 * 32 * 32 + 4)
    assert stats["neighbors"] == 1


def test_too_large_a_gamma_drives_workers_apart() -> None:
    settings = {"gamma": 0.6, "topology": "torus", "lr": 0.1}
    with quadratic_run(Quadratics(WORKERS), ChocoSGD, "topk:ratio=0.1", **settings) as run:
        mean = start_apart(run)
        before = (run.matrix() - mean).norm()
        gossip(run, 180)
        assert (run.matrix() - mean).norm() > 2 * before
