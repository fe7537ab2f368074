"""Dion: against the algorithm of one worker with the mean gradient, and on real ranks."""

import math

import momentum_jobs as jobs
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.comm.simulated import Simulated
from gradwire.errors import ConfigError
from gradwire.memory.residual import Residual
from gradwire.optim import DionUpdate
from gradwire.optim.dion import DionFactors
from gradwire.simulation import Simulation
from gradwire.types import EncodeContext
from lockstep import mean_of, open_lanes
from processes import Ranks

ROWS, COLUMNS = 48, 40


def gradient(step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(ROWS, COLUMNS, generator=generator)


def simulation(workers: int, rank: int, momentum: float = 0.9) -> Simulation:
    return gradwire.simulate(
        {"w": torch.zeros(ROWS, COLUMNS)},
        DionFactors(rank, momentum),
        workers=workers,
        memory=Residual(),
        update=DionUpdate(),
    )


def test_workers_are_one_with_the_mean_gradient() -> None:
    """The published algorithm, in float64: B = M + G, P of B Q, R = B' P, M = B - (1 - mu) P R'."""
    workers, rank, mu = 3, 5, 0.9
    ours = simulation(workers, rank, mu)
    q = ours.workers[0].lanes["w"].aggregator_state["q"].double()
    momentum = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for step in range(5):
        grads = [gradient(step, worker) for worker in range(workers)]
        b = momentum + torch.stack(grads).double().mean(0)
        p, triangle = torch.linalg.qr(b @ q)
        p = p * triangle.diagonal().sign()
        r = b.T @ p
        momentum = b - (1 - mu) * p @ r.T
        q = r / r.norm(dim=0)
        found = ours.step([{"w": grad} for grad in grads])["w"]
        expected = math.sqrt(ROWS / COLUMNS) * p @ q.T
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    kept = [worker.lanes["w"].memory_state["residual"] for worker in ours.workers]
    assert not torch.equal(kept[0], kept[1])
    mean = torch.stack(kept).mean(0).view(ROWS, COLUMNS)
    torch.testing.assert_close(mean.double(), momentum, rtol=1e-4, atol=1e-5)


def test_at_full_rank_the_momentum_decays_as_a_whole() -> None:
    """Then the projection on P is all of B, so that M = mu (M + G)."""
    lanes = open_lanes(
        DionFactors(COLUMNS, 0.9), "residual", "mean", [EncodeContext((ROWS, COLUMNS))]
    )
    momentum = torch.zeros(ROWS, COLUMNS)
    for step in range(3):
        mean_of(Simulated(1), lanes, [gradient(step, 0)])
        momentum = 0.9 * (momentum + gradient(step, 0))
        kept = lanes[0].memory_state["residual"].view(ROWS, COLUMNS)
        torch.testing.assert_close(kept, momentum, rtol=1e-4, atol=1e-5)


def test_an_update_has_unit_columns_in_the_basis_of_p() -> None:
    update = simulation(2, 4).step([{"w": gradient(0, worker)} for worker in range(2)])["w"]
    assert int(torch.linalg.matrix_rank(update)) == 4
    assert float(update.square().sum()) == pytest.approx(4 * ROWS / COLUMNS, rel=1e-4)


def test_zeros_do_not_move_and_leave_the_factor() -> None:
    ours = simulation(2, 3)
    before = ours.workers[0].lanes["w"].aggregator_state["q"].clone()
    update = ours.step([{"w": torch.zeros(ROWS, COLUMNS)}] * 2)["w"]
    assert not update.any()
    assert torch.equal(ours.workers[0].lanes["w"].aggregator_state["q"], before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nonfinite_step_is_undone(bad: float) -> None:
    ours = simulation(2, 3)
    ours.step([{"w": gradient(0, worker)} for worker in range(2)])
    lane = ours.workers[1].lanes["w"]
    before = {**lane.memory_state, **lane.aggregator_state}
    before = {key: tensor.clone() for key, tensor in before.items()}
    spoilt = gradient(1, 0)
    spoilt[2, 3] = bad
    ours.step([{"w": spoilt}, {"w": gradient(1, 1)}])
    after = {**lane.memory_state, **lane.aggregator_state}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_ranks_stay_equal_and_keep_the_method(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.trained, "Dion")
    assert all(torch.equal(weights, results[0][0]) for weights, _, _ in results)
    for _, kept, error in results:
        # The last matrix is the output layer.
        assert kept == ["0.weight", "2.weight"]
        assert "Dion: the method of compression is part of the optimiser" in error


def test_a_resumed_run_continues_bitwise(four_ranks: Ranks) -> None:
    assert four_ranks.run(jobs.resumed, "Dion", 3) == [True] * 4


def test_bad_settings_are_refused_by_name(four_ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="dion: momentum must be"):
        DionFactors(2, 1.5)
    for exchange, long, rank, momentum, bias in four_ranks.run(jobs.dion_refusals):
        assert exchange == "Dion: exchange is part of the method, leave it out"
        assert long.startswith("Dion: rank 500 makes none of the 2 chosen matrices shorter")
        assert rank == "powersgd: rank must be at least 1, got 0"
        assert momentum.startswith("dion: momentum must be")
        assert bias.startswith("Dion: matrices must choose parameters of two or more dimensions")
