"""One faulty worker of five: training goes on if the aggregation tolerates faulty ranks."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.base.aggregation import tolerated
from gradwire.engine.make_plan import make_plan
from gradwire.engine.nonfinite import NonFiniteGuard
from lockstep import noise

WORKERS, FAULTY, STEPS, RATE = 5, 3, 30, 0.5
ROBUST = ("median", "trimmed", "diameter")
NAN, INF = float("nan"), float("inf")

Fault = Callable[[Tensor, int], Tensor]
FAULTS: dict[str, Fault] = {
    "flipped": lambda grad, step: -100 * grad,
    "large": lambda grad, step: 1e4 * noise(*grad.shape, seed=step),
    "nan": lambda grad, step: torch.full_like(grad, NAN),
    "infinite": lambda grad, step: torch.full_like(grad, INF),
    "constant": lambda grad, step: torch.full_like(grad, 50.0),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def batch(seed: int, count: int = 64) -> tuple[Tensor, Tensor]:
    """Returns points and their classes: the nearest of four random directions."""
    points = noise(count, 20, seed=seed)
    return points, (points @ noise(20, 4, seed=12345)).argmax(1)


def train(exchange: str, fault: Fault | None, spec: str = "qsgd:bits=8") -> float:
    """Trains, with one faulty worker if `fault` is given; returns the accuracy on unseen points."""
    model = net()
    sim = gradwire.simulate(model, spec, workers=WORKERS, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        gradients = []
        for worker in range(WORKERS):
            model.zero_grad()
            points, classes = batch(1 + step * WORKERS + worker)
            nn.functional.cross_entropy(model(points), classes).backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            if fault is not None and worker == FAULTY:
                grads = {n: fault(g, step) for n, g in grads.items()}
            gradients.append(grads)
        means = sim.step(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    points, classes = batch(0, 1000)
    return float((model(points).argmax(1) == classes).float().mean())


@pytest.fixture(scope="module")
def fault_free() -> float:
    accuracy = train("gather", None)
    assert accuracy > 0.8
    return accuracy


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ROBUST)
def test_robust_training_nearly_reaches_the_fault_free_accuracy(
    name: str, fault: str, fault_free: float
) -> None:
    assert train(f"gather:aggregate={name}", FAULTS[fault]) > fault_free - 0.05


@pytest.mark.parametrize("fault", ["flipped", "nan", "constant"])
def test_training_by_the_mean_does_not(fault: str, fault_free: float) -> None:
    assert train("gather", FAULTS[fault]) < fault_free - 0.3


@pytest.mark.parametrize("name", ROBUST)
def test_a_robust_aggregation_costs_little_without_faults(name: str, fault_free: float) -> None:
    assert train(f"gather:aggregate={name}", None) > fault_free - 0.05


def shapes() -> dict[str, Tensor]:
    return {"w": torch.zeros(40, 30), "b": torch.zeros(7)}


def steps_of(bad: dict[int, float], memory: str | None = None) -> gradwire.Simulation:
    """Runs three steps by trimmed mean; in the second some workers have a non-finite entry."""
    sim = gradwire.simulate(
        shapes(),
        "topk:ratio=0.3,values=fp32",
        workers=WORKERS,
        memory=memory,
        exchange="gather:aggregate=trimmed",
    )
    for step in range(3):
        common = {n: noise(*t.shape, seed=step) for n, t in shapes().items()}
        grads = [{n: t.clone() for n, t in common.items()} for _ in range(WORKERS)]
        if step == 1:
            for worker, value in bad.items():
                grads[worker]["w"][3, 3] = value
        sim.step(grads)
    return sim


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("memory", ["residual", "momentum", "ef21", "ef21_sgdm", "lowbit"])
def test_a_tolerated_flag_skips_no_step_and_leaves_no_trace(value: float, memory: str) -> None:
    sim = steps_of({FAULTY: value}, memory)
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (3, 0)
    for worker in sim.workers:
        for lane in worker.lanes.values():
            assert all(t.isfinite().all() for t in lane.memory_state.values())
            assert lane.ctx.step == 3


def test_other_ranks_keep_the_residuals_of_a_fault_free_run() -> None:
    """Holds also for a step that excludes one rank."""
    sim, twin = steps_of({FAULTY: NAN}), steps_of({})
    for rank in range(WORKERS):
        same = torch.equal(
            sim.workers[rank].lanes["w"].memory_state["residual"],
            twin.workers[rank].lanes["w"].memory_state["residual"],
        )
        assert same == (rank != FAULTY)


def test_more_flags_than_tolerated_skip_the_step() -> None:
    sim = steps_of({0: NAN, FAULTY: INF})
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (2, 1)


def test_one_flag_skips_the_step_if_none_is_tolerated() -> None:
    sim = gradwire.simulate(shapes(), "topk:ratio=0.1", workers=WORKERS, exchange="gather")
    grads = [{n: torch.ones_like(t) for n, t in shapes().items()} for _ in range(WORKERS)]
    grads[FAULTY]["w"][0, 0] = NAN
    assert math.isnan(float(sim.step(grads)["w"].sum()))
    assert sim.stats()["skipped"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mean", 0), ("majority", 0), ("median", 2), ("trimmed", 1), ("diameter", 1)],
)
def test_tolerated_faults_of_five_ranks(name: str, expected: int) -> None:
    assert tolerated(name, 5) == expected
    plan = make_plan("efsign", None, f"gather:aggregate={name}", [torch.zeros(64, 64)], 5)
    assert plan.exchange.tolerated(5) == expected


def test_a_mean_of_flags_tolerates_none() -> None:
    guard = NonFiniteGuard([torch.zeros(2)], [], tolerated=1)
    guard.begin()
    guard.receive([(torch.tensor([1 / 3]),)], {}, {})
    assert guard.flag


def test_a_node_with_a_faulty_rank_is_lost_as_a_whole() -> None:
    """Five nodes of two ranks; one node has a rank with a NaN."""
    exchange = "hierarchical:node=2,between=gather:aggregate=median"
    plan = make_plan("efsign", None, exchange, [torch.zeros(64, 64)], 10)
    assert plan.exchange.tolerated(10) == 2
    sim = gradwire.simulate(shapes(), "qsgd:bits=8", workers=10, exchange=exchange)
    grads = [{n: torch.ones_like(t) for n, t in shapes().items()} for _ in range(10)]
    grads[FAULTY]["w"][0, 0] = NAN
    means = sim.step(grads)
    assert sim.stats()["skipped"] == 0
    assert all(torch.equal(means[n], torch.ones_like(t)) for n, t in shapes().items())
