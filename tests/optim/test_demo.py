"""DeMo: against a transcription of the published algorithm, its properties, and real ranks."""

import math

import momentum_jobs as jobs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import gradwire
from gradwire.compressors.chunktopk import ChunkTopK
from gradwire.errors import ConfigError
from gradwire.memory.residual import Residual
from gradwire.optim import DeMoUpdate
from gradwire.optim.demo import MERGE, largest_divisor
from gradwire.simulation import Simulation
from processes import Ranks

ROWS, COLUMNS, SIDE, KEEP, DECAY = 48, 40, 8, 5, 0.9

Array = NDArray[np.float64]


def gradient(step: int, worker: int) -> Tensor:
    """Returns a gradient, most of which all workers share."""
    own = torch.Generator().manual_seed(100 * step + worker)
    common = torch.Generator().manual_seed(100 * step + 99)
    shape = (ROWS, COLUMNS)
    return torch.randn(shape, generator=common) + 0.3 * torch.randn(shape, generator=own)


def simulation(workers: int, spec: str, *, sign: bool) -> Simulation:
    return gradwire.simulate(
        {"w": torch.zeros(ROWS, COLUMNS)},
        spec,
        workers=workers,
        memory=Residual(DECAY) if spec != "none" else None,
        exchange=MERGE,
        update=DeMoUpdate(SIDE, sign),
    )


def transform(tile: Array) -> Array:
    """Returns the orthonormal two-dimensional DCT-II of a tile, from its definition."""
    size = len(tile)
    scale = [math.sqrt((1 if f == 0 else 2) / size) for f in range(size)]
    basis = np.array(
        [
            [scale[f] * math.cos(math.pi * (2 * n + 1) * f / (2 * size)) for n in range(size)]
            for f in range(size)
        ]
    )
    return np.einsum("fr,rc,gc->fg", basis, tile, basis)


def inverse(tile: Array) -> Array:
    size = len(tile)
    identity = np.eye(size * size).reshape(-1, size, size)
    columns = np.stack([transform(one) for one in identity])
    # The transform is orthonormal, so that its inverse is its transpose.
    return np.einsum("pfg,fg->p", columns, tile).reshape(size, size)


def published_step(momenta: list[Array], grads: list[Array], lr: float) -> Array:
    """Takes a step of the release, which multiplies gradients by the rate; returns the update."""
    update = np.zeros((ROWS, COLUMNS))
    for worker, grad in enumerate(grads):
        momenta[worker] = DECAY * momenta[worker] + lr * grad
    for top in range(0, ROWS, SIDE):
        for left in range(0, COLUMNS, SIDE):
            place = slice(top, top + SIDE), slice(left, left + SIDE)
            sums, counts = np.zeros(SIDE * SIDE), np.zeros(SIDE * SIDE)
            for momentum in momenta:
                waves = transform(momentum[place]).reshape(-1)
                largest = np.argsort(-np.abs(waves))[:KEEP]
                sent = np.zeros_like(waves)
                sent[largest] = waves[largest]
                momentum[place] -= inverse(sent.reshape(SIDE, SIDE))
                sums += sent
                counts[largest] += 1
            update[place] = inverse((sums / np.maximum(counts, 1)).reshape(SIDE, SIDE))
    return update


def test_steps_are_those_of_the_published_algorithm() -> None:
    """The rate scales momentum and update alike, so here it is outside of both."""
    workers, lr = 3, 0.01
    ours = simulation(workers, f"chunktopk:k={KEEP},chunk={SIDE**2},values=fp32", sign=False)
    signs = simulation(workers, f"chunktopk:k={KEEP},chunk={SIDE**2},values=fp32", sign=True)
    momenta: list[Array] = [np.zeros((ROWS, COLUMNS)) for _ in range(workers)]
    for step in range(4):
        grads = [gradient(step, worker) for worker in range(workers)]
        theirs = published_step(momenta, [g.double().numpy() for g in grads], lr)
        found = ours.step([{"w": grad} for grad in grads])["w"]
        np.testing.assert_allclose(lr * found.numpy(), theirs, rtol=0, atol=1e-7)
        direction = signs.step([{"w": grad} for grad in grads])["w"]
        assert torch.equal(direction, found.sign())
        # Rounding may change the sign of what is nearly zero.
        clear = np.abs(theirs) > 1e-6
        assert np.array_equal(direction.numpy()[clear], np.sign(theirs)[clear])
    assert all(np.abs(momentum).max() > 0 for momentum in momenta)


def test_what_is_sent_leaves_the_momentum() -> None:
    """Of one worker: update plus momentum is the decayed momentum plus the gradient."""
    ours, rule = simulation(1, f"chunktopk:k={KEEP},chunk=64", sign=False), DeMoUpdate(SIDE, False)
    before = torch.zeros(ROWS, COLUMNS)
    for step in range(3):
        sent = ours.step([{"w": gradient(step, 0)}])["w"]
        state = ours.workers[0].lanes["w"].memory_state
        after = rule.of_mean(state["residual"].view(ROWS, COLUMNS).clone(), {}, {})
        expected = DECAY * before + gradient(step, 0)
        torch.testing.assert_close(sent + after, expected, rtol=1e-4, atol=1e-5)
        before = after


def test_all_coefficients_are_the_sign_of_the_mean_gradient() -> None:
    ours = simulation(2, "none", sign=True)
    grads = [gradient(0, worker) for worker in range(2)]
    found, mean = ours.step([{"w": grad} for grad in grads])["w"], (grads[0] + grads[1]) / 2
    clear = mean.abs() > 1e-5
    assert torch.equal(found[clear], mean.sign()[clear])


@pytest.mark.parametrize("shape", [(6, 10), (7, 64, 3), (1, 5), (128, 64)])
def test_the_transform_keeps_norms_and_has_an_inverse(shape: tuple[int, ...]) -> None:
    rule, x = DeMoUpdate(SIDE, sign=False), torch.randn(shape)
    waves = rule.update(x.clone(), {}, {}).reshape(shape)
    torch.testing.assert_close(waves.norm(), x.norm())
    torch.testing.assert_close(rule.of_mean(waves, {}, {}), x, rtol=1e-4, atol=1e-5)


def test_tiles_have_the_largest_divisors_for_sides() -> None:
    found = {size: largest_divisor(size, 64) for size in (50304, 48, 67, 96, 1)}
    assert found == {50304: 64, 48: 48, 67: 1, 96: 48, 1: 1}


def test_ranks_stay_equal_and_keep_the_method(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.trained, "DeMo")
    assert all(torch.equal(weights, results[0][0]) for weights, _, _ in results)
    for _, kept, error in results:
        assert kept == ["0.weight", "2.weight"]
        assert "DeMo: the method of compression is part of the optimiser" in error


def test_bytes_are_those_of_the_largest_coefficients(four_ranks: Ranks) -> None:
    """A rank sends 4 of every 64 coefficients to three others: positions, and two bytes each."""
    message = ChunkTopK(k=4, chunk=64).nbytes((96, 64))
    assert message == 384 * 2 + 288
    assert four_ranks.run(jobs.bytes_of_demo, 2) == [2 * 3 * message] * 4


def test_a_resumed_run_of_demo_continues_bitwise(four_ranks: Ranks) -> None:
    assert four_ranks.run(jobs.resumed, "DeMo", 3) == [True] * 4


def test_bad_settings_are_refused_by_name(four_ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="demo: side must be"):
        DeMoUpdate(side=0)
    for found in four_ranks.run(jobs.demo_refusals):
        assert found == [
            "DeMo: memory is part of the method, leave it out",
            "DeMo: exchange is part of the method, leave it out",
            "chunktopk: k must be at most chunk 64, got 65",
            "residual: decay must be in (0, 1], got 1.5",
        ]
