"""1-bit Adam: AdamW in the warm-up, then the published steps, on simulated and real ranks."""

import math

import momentum_jobs as jobs
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.errors import ConfigError
from gradwire.optim import AdamUpdate, OneBitAdamUpdate
from gradwire.simulation import Simulation
from processes import Ranks

SHAPE = 40, 32


def gradient(step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    grad = torch.randn(SHAPE, generator=generator)
    # As a row of an embedding whose token never occurs.
    grad[3] = 0.0
    return grad


def frozen(spec: str, workers: int, warmup: int) -> tuple[Simulation, Tensor, Tensor]:
    """Returns workers at the end of a warm-up of Adam, and its moments."""
    rule, adam = OneBitAdamUpdate(), AdamUpdate()
    state = adam.state(math.prod(SHAPE), torch.device("cpu"))
    for step in range(warmup):
        grads = [gradient(step, worker) for worker in range(workers)]
        adam.update(torch.stack(grads).mean(0), state, state)
    simulation = gradwire.simulate(
        {"w": torch.zeros(SHAPE)}, spec, workers=workers, exchange="gather", update=rule
    )
    for worker in simulation.workers:
        for key, tensor in state.items():
            worker.lanes["w"].memory_state[key].copy_(tensor)
    return simulation, state["exp_avg"].view(SHAPE).clone(), state["exp_avg_sq"].view(SHAPE)


def test_frozen_steps_are_those_of_the_published_algorithm() -> None:
    workers, warmup = 3, 5
    simulation, momentum, square = frozen("efsign", workers, warmup)
    residuals = [torch.zeros(SHAPE) for _ in range(workers)]
    corrected = (square / (1 - 0.999**warmup)).sqrt()
    for step in range(warmup, warmup + 4):
        grads = [gradient(step, worker) for worker in range(workers)]
        sent = []
        for worker, grad in enumerate(grads):
            total = 0.9 * momentum + 0.1 * grad + residuals[worker]
            sent.append(total.abs().mean() * torch.where(total >= 0, 1.0, -1.0))
            residuals[worker] = total - sent[-1]
        momentum = torch.stack(sent).mean(0)
        momentum[3] = 0.0
        expected = momentum / (1 - 0.9 ** (step + 1)) / (corrected + 1e-8)
        found = simulation.step([{"w": grad} for grad in grads])["w"]
        assert not found[3].any()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for worker, residual in zip(simulation.workers, residuals, strict=True):
        state = worker.lanes["w"].memory_state
        assert float(state["frozen_step"]) == warmup
        assert torch.equal(state["exp_avg_sq"].view(SHAPE), square)
        torch.testing.assert_close(state["exp_avg"].view(SHAPE), momentum, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state["residual"].view(SHAPE), residual, rtol=1e-4, atol=1e-5)


def test_without_compression_a_frozen_step_is_adam_of_the_old_variance() -> None:
    """The mean of momenta is the momentum of the mean gradient."""
    simulation, momentum, square = frozen("none", 2, 4)
    grads = [gradient(4, worker) for worker in range(2)]
    found = simulation.step([{"w": grad} for grad in grads])["w"]
    mean = 0.9 * momentum + 0.1 * (grads[0] + grads[1]) / 2
    divisor = (square / (1 - 0.999**4)).sqrt() + 1e-8
    expected = torch.where(square > 0, mean / (1 - 0.9**5) / divisor, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_nonfinite_step_leaves_the_momentum() -> None:
    simulation, _, _ = frozen("efsign", 2, 3)
    before = simulation.workers[1].lanes["w"].memory_state["exp_avg"].clone()
    simulation.step([{"w": gradient(0, 0)}, {"w": gradient(0, 1) * torch.inf}])
    assert torch.equal(simulation.workers[1].lanes["w"].memory_state["exp_avg"], before)


def test_the_warm_up_is_adamw_and_ranks_stay_equal(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.trained_by_onebit)
    for warm, adamw, is_frozen, momenta, weights, spec in results:
        assert torch.equal(warm, adamw)
        assert is_frozen
        assert spec == "efsign"
        assert torch.equal(momenta, results[0][3])
        assert torch.equal(weights, results[0][4])
        assert weights.isfinite().all()


@pytest.mark.parametrize("first", [2, 3, 5])
def test_a_resumed_run_continues_bitwise(four_ranks: Ranks, first: int) -> None:
    """Saved in the warm-up (after the step in which DDP makes its buckets), at its end, later."""
    assert four_ranks.run(jobs.resumed, "OneBitAdam", first) == [True] * 4


def test_bad_settings_are_refused_by_name(four_ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="onebit_adam: betas must be two numbers"):
        OneBitAdamUpdate(beta2=1.0)
    for warmup, memory, unbiased, betas, none in four_ranks.run(jobs.onebit_refusals):
        assert warmup == "OneBitAdam: warmup must be at least 1, got 0"
        assert memory == "OneBitAdam: memory is part of the method, leave it out"
        assert "does not go with memory 'residual'" in unbiased
        assert "OneBitAdam: betas must be two numbers in [0, 1)" in betas
        assert "OneBitAdam: compress must be a contraction, got 'none'" in none
