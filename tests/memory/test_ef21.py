"""EF21: messages add up to the gradient itself, also where workers differ."""

import pytest
import torch

import gradwire
from gradwire.memory.ef21 import EF21
from lockstep import Lockstep, distance_after, noise


def test_two_steps_by_hand() -> None:
    """The largest of g - h in every step: first 4 and -8, then the other entry of each worker."""
    workers = Lockstep("topk:ratio=0.5,values=fp32", "ef21", "gather", 2, size=2)
    grads = torch.tensor([4.0, 1.0]), torch.tensor([2.0, -8.0])
    assert workers.step(*grads).tolist() == [2.0, -4.0]
    assert workers.stacked_state("own").tolist() == [[4.0, 0.0], [0.0, -8.0]]
    assert workers.step(*grads).tolist() == [3.0, -3.5]
    assert workers.stacked_state("own").tolist() == [[4.0, 1.0], [2.0, -8.0]]


@pytest.mark.parametrize("exchange_name", ["gather", "sharded", "leader"])
def test_comes_to_a_constant_gradient(exchange_name: str) -> None:
    workers = Lockstep("topk:ratio=0.1,values=bf16", "ef21", exchange_name, 500, size=3)
    grads = noise(3, 500)
    for _ in range(60):
        out = workers.step(*grads)
    torch.testing.assert_close(out, grads.mean(dim=0), rtol=1e-4, atol=1e-5)


def test_the_distance_shrinks_as_the_contraction_implies() -> None:
    """|g - h|² falls to 1 - ratio of itself or less in every step."""
    workers = Lockstep("topk:ratio=0.1,values=fp32", "ef21", "gather", 400, size=2)
    grads = noise(2, 400, seed=1)
    before = grads.square().sum(dim=1)
    for _ in range(8):
        workers.step(*grads)
        now = (grads - workers.stacked_state("own")).square().sum(dim=1)
        assert (now <= 0.9 * before).all()
        before = now


def test_the_common_sum_is_the_mean_of_the_workers_sums() -> None:
    """After 300 steps of changing gradients of size 1, to a few times float32's 6e-8."""
    workers = Lockstep("topk:ratio=0.05,values=bf16", "ef21", "gather", 1000, size=4)
    for step in range(300):
        workers.step(*noise(4, 1000, seed=step))
    own, mean = workers.stacked_state("own"), workers.stacked_state("mean")
    assert all(torch.equal(row, mean[0]) for row in mean)
    error = (own.double().mean(dim=0) - mean[0].double()).abs()
    assert error.max() < 2e-6
    assert own.abs().max() > 1


def test_an_entry_that_is_not_sent_does_not_change_by_a_bit() -> None:
    workers = Lockstep("topk:ratio=0.25,values=fp32", "ef21", "gather", 4, size=1)
    workers.step(torch.tensor([1 / 3, 0.0, 0.0, 0.0]))
    for step in range(20):
        workers.step(torch.tensor([1e-7 * step, 5.0 + step, 0.0, 0.0]))
        assert workers.stacked_state("own")[0, 0] == torch.tensor(1 / 3)


def test_workers_that_differ_reach_the_common_optimum() -> None:
    """No bound on how gradients differ: each worker pulls 100 times as hard as all together.

    Without a memory every worker sends its own large part for ever, and never the common one.
    """
    pulls = 100 * noise(4, 10, seed=2)
    optima = pulls - pulls.mean(dim=0) + noise(10, seed=3)
    plain = Lockstep("topk:ratio=0.1,values=fp32", "none", "gather", 10, size=4)
    ef21 = Lockstep("topk:ratio=0.1,values=fp32", "ef21", "gather", 10, size=4)
    assert distance_after(plain, optima, 300, rate=0.05) > 1
    assert distance_after(ef21, optima, 300, rate=0.05) < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "efsign"])
def test_one_bad_gradient_shows_and_is_over(spec: str, bad: float) -> None:
    workers = Lockstep(spec, "ef21", "gather", 40, size=2)
    grads = noise(2, 40)
    workers.step(*grads)
    spoilt = grads.clone()
    spoilt[1, 7] = bad
    assert not workers.step(*spoilt).isfinite().all()
    for _ in range(200):
        out = workers.step(*grads)
    torch.testing.assert_close(out, grads.mean(dim=0), rtol=1e-3, atol=1e-3)


def test_more_non_finite_entries_than_are_sent_leave_no_trace() -> None:
    workers = Lockstep("topk:ratio=0.1", "ef21", "gather", 40, size=2)
    assert not workers.step(torch.full((40,), float("nan")), torch.ones(40)).isfinite().all()
    assert workers.stacked_state("own").isfinite().all()
    assert workers.stacked_state("mean").isfinite().all()


def test_another_learning_rate_changes_nothing() -> None:
    state = {"own": torch.ones(3), "mean": torch.ones(3)}
    EF21().rescale(state, 0.1)
    assert all(torch.equal(tensor, torch.ones(3)) for tensor in state.values())


def test_a_quantiser_that_expands_is_refused() -> None:
    with pytest.raises(gradwire.ConfigError, match="does not go with memory 'ef21'"):
        gradwire.simulate({"w": torch.zeros(64, 64)}, "qsgd:bits=2", workers=2, memory="ef21")


def test_it_runs_beside_tensors_that_go_dense() -> None:
    sim = gradwire.simulate(
        {"w": torch.zeros(64, 64), "b": torch.zeros(8)},
        "topk:ratio=0.1",
        workers=2,
        memory="ef21",
    )
    grads = [{"w": noise(64, 64, seed=s), "b": noise(8, seed=s)} for s in range(2)]
    for _ in range(40):
        means = sim.step(grads)
    for name, mean in means.items():
        torch.testing.assert_close(mean, (grads[0][name] + grads[1][name]) / 2, atol=1e-4, rtol=0)
    assert sim.stats()["memory"] == "ef21"
