"""One lying worker of five: training goes on where the aggregation bears liars."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.base.aggregation import borne
from gradwire.engine.nonfinite import NonFiniteGuard
from gradwire.engine.plan import make_plan
from lockstep import noise

WORKERS, LIAR, STEPS, RATE = 5, 3, 30, 0.5
ROBUST = ("median", "trimmed", "diameter")
NAN, INF = float("nan"), float("inf")

Lie = Callable[[Tensor, int], Tensor]
LIES: dict[str, Lie] = {
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
    """Four classes: which of four random directions a point looks along."""
    points = noise(count, 20, seed=seed)
    return points, (points @ noise(20, 4, seed=12345)).argmax(1)


def train(exchange: str, lie: Lie | None, spec: str = "qsgd:bits=8") -> float:
    """The share of unseen points that a model gets right; a liar trains along if it is given."""
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
            if lie is not None and worker == LIAR:
                grads = {n: lie(g, step) for n, g in grads.items()}
            gradients.append(grads)
        means = sim.step(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    points, classes = batch(0, 1000)
    return float((model(points).argmax(1) == classes).float().mean())


@pytest.fixture(scope="module")
def honest() -> float:
    accuracy = train("gather", None)
    assert accuracy > 0.8
    return accuracy


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ROBUST)
def test_training_reaches_nearly_what_the_honest_do(name: str, lie: str, honest: float) -> None:
    assert train(f"gather:aggregate={name}", LIES[lie]) > honest - 0.05


@pytest.mark.parametrize("lie", ["flipped", "nan", "constant"])
def test_the_mean_does_not(lie: str, honest: float) -> None:
    assert train("gather", LIES[lie]) < honest - 0.3


@pytest.mark.parametrize("name", ROBUST)
def test_an_honest_group_loses_little(name: str, honest: float) -> None:
    assert train(f"gather:aggregate={name}", None) > honest - 0.05


def shapes() -> dict[str, Tensor]:
    return {"w": torch.zeros(40, 30), "b": torch.zeros(7)}


def steps_of(bad: dict[int, float], memory: str | None = None) -> gradwire.Simulation:
    """Three steps by median; in the second some workers have an entry that is not finite."""
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
def test_a_lone_alarm_stops_nobody_and_leaves_no_trace(value: float, memory: str) -> None:
    sim = steps_of({LIAR: value}, memory)
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (3, 0)
    for worker in sim.workers:
        for lane in worker.lanes.values():
            assert all(t.isfinite().all() for t in lane.memory_state.values())
            assert lane.ctx.step == 3


def test_the_others_remember_what_they_would_have() -> None:
    """Also of a step that one of them has no part in."""
    sim, twin = steps_of({LIAR: NAN}), steps_of({})
    for rank in range(WORKERS):
        same = torch.equal(
            sim.workers[rank].lanes["w"].memory_state["residual"],
            twin.workers[rank].lanes["w"].memory_state["residual"],
        )
        assert same == (rank != LIAR)


def test_more_alarms_than_are_borne_count() -> None:
    sim = steps_of({0: NAN, LIAR: INF})
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (2, 1)


def test_without_liars_in_mind_one_alarm_is_enough() -> None:
    sim = gradwire.simulate(shapes(), "topk:ratio=0.1", workers=WORKERS, exchange="gather")
    grads = [{n: torch.ones_like(t) for n, t in shapes().items()} for _ in range(WORKERS)]
    grads[LIAR]["w"][0, 0] = NAN
    assert math.isnan(float(sim.step(grads)["w"].sum()))
    assert sim.stats()["skipped"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mean", 0), ("majority", 0), ("median", 2), ("trimmed", 1), ("diameter", 1)],
)
def test_how_many_of_five_are_borne(name: str, expected: int) -> None:
    assert borne(name, 5) == expected
    plan = make_plan("efsign", None, f"gather:aggregate={name}", [torch.zeros(64, 64)], 5)
    assert plan.bears(5) == expected


def test_a_mean_of_alarms_bears_none() -> None:
    alarm = NonFiniteGuard([torch.zeros(2)], borne=1)
    alarm.hears([(torch.tensor([1 / 3]),)])
    assert alarm.raised


def test_nodes_are_lost_as_a_whole() -> None:
    """Five nodes of two, of which one has a rank without a number."""
    way = "hierarchical:node=2,between=gather:aggregate=median"
    plan = make_plan("efsign", None, way, [torch.zeros(64, 64)], 10)
    assert plan.bears(10) == 2
    sim = gradwire.simulate(shapes(), "qsgd:bits=8", workers=10, exchange=way)
    grads = [{n: torch.ones_like(t) for n, t in shapes().items()} for _ in range(10)]
    grads[LIAR]["w"][0, 0] = NAN
    means = sim.step(grads)
    assert sim.stats()["skipped"] == 0
    assert all(torch.equal(means[n], torch.ones_like(t)) for n, t in shapes().items())
