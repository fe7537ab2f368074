"""Every method of the catalogue trains: its usual setting, its own memory and exchange.

So does every memory and every exchange, with the method that leaves most to them.

A student learns the classes that a fixed random teacher gives to random inputs, on four simulated
workers with data of their own. What the folders hold is tried, whatever it is.
"""

from dataclasses import asdict
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradwire
from gradwire.base import Compressor, Memory
from gradwire.compressors._sparsifier import Sparsifier
from gradwire.engine.plan import wants_residual
from gradwire.spec import compressor_classes, format_spec, memory_classes, parse

WORKERS, EXAMPLES, INPUTS, HIDDEN, CLASSES = 4, 128, 64, 32, 32
STEPS = 150
RATE = 0.15
VOTE_RATE = 0.006
"""For votes, which are signs: a step moves every weight by just this much."""

SHORTFALL = {"dense": 0.02, "quantisation": 0.05}
"""How much of what dense training takes off the loss may be missing, by family.

Methods that say something of every entry in every step follow dense training closely.
"""
SHORTFALL_OF_A_PART = 0.1
"""Others say about a hundredth in a step, and error feedback makes up for the rest of it."""

SHORTFALL_OF_A_BLIND_CHOICE = 0.35
"""Where entries are chosen at random, a third of them is not said once in the run's first hundred
steps; that costs a quarter. More is a fault."""

FORGETFUL = 0.3
"""What is missing with a residual that forgets a tenth a step, where an entry waits a hundred."""

PART = "topk:ratio=0.01"
"""What it does not say is nearly all, so that memories and exchanges have most to do."""


class Task(NamedTuple):
    inputs: Tensor  # [workers, examples, inputs]
    labels: Tensor  # [workers, examples]


def usual() -> list[Compressor]:
    """Each method in its usual setting."""
    return [cls(**cls.examples[0]) for cls in compressor_classes().values()]


@cache
def task() -> Task:
    """The teacher has a hidden layer, so that the student cannot become its copy."""
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(WORKERS, EXAMPLES, INPUTS, generator=dice)
    first = torch.randn(INPUTS, HIDDEN, generator=dice)
    second = torch.randn(HIDDEN, CLASSES, generator=dice)
    return Task(inputs, ((inputs @ first).relu() @ second).argmax(dim=2))


def gradients(student: dict[str, Tensor]) -> tuple[float, list[dict[str, Tensor]]]:
    """The loss over all data, and each worker's gradients on its own."""
    # A copy a worker, so that one backward pass gives the gradients of all of them apart.
    own = {n: p.expand(WORKERS, *p.shape).clone().requires_grad_() for n, p in student.items()}
    outputs = torch.baddbmm(own["bias"][:, None], task().inputs, own["weight"])
    losses = cross_entropy(outputs.transpose(1, 2), task().labels, reduction="none").mean(dim=1)
    found = torch.autograd.grad(losses.sum(), list(own.values()))
    apart = [{n: g[rank] for n, g in zip(own, found, strict=True)} for rank in range(WORKERS)]
    return float(losses.detach().mean()), apart


def memories() -> list[Memory]:
    """Every memory with every one of its settings, but the one that forgets all."""
    found = [cls(**example) for cls in memory_classes().values() for example in cls.examples]
    return [memory for memory in found if memory.needs_contraction]


def train(
    method: Compressor | str,
    steps: int,
    rate: float,
    memory: Memory | str | None = None,
    exchange: str = "auto",
) -> tuple[float, float]:
    """The loss at the start and at the end."""
    student = {"weight": torch.zeros(INPUTS, CLASSES), "bias": torch.zeros(CLASSES)}
    sim = gradwire.simulate(student, method, workers=WORKERS, memory=memory, exchange=exchange)
    if not isinstance(method, str):
        lane = sim.workers[0].lanes["weight"]
        assert lane.compressor == method, "the weight is too small for this method, and goes dense"
    start, _ = gradients(student)
    for _ in range(steps):
        means = sim.step(gradients(student)[1])
        student = {name: p - rate * means[name] for name, p in student.items()}
    return start, gradients(student)[0]


@cache
def dense_gain() -> float:
    """What training without compression takes off the loss."""
    start, end = train("none", STEPS, RATE)
    return start - end


def gain(method: Compressor | str, rate: float = RATE, **way: Memory | str) -> float:
    """What training takes off the loss, as a part of what it takes off without compression."""
    start, end = train(method, STEPS, rate, **way)
    return (start - end) / dense_gain()


def allowed(method: Compressor) -> float:
    if isinstance(method, Sparsifier) and not method.sends_indices:
        return SHORTFALL_OF_A_BLIND_CHOICE
    return SHORTFALL.get(method.family, SHORTFALL_OF_A_PART)


@pytest.mark.parametrize("method", usual(), ids=format_spec)
def test_every_method_trains(method: Compressor) -> None:
    rate = VOTE_RATE if method.traits().is_vote else RATE
    assert gain(method, rate) >= 1 - allowed(method)


@pytest.mark.parametrize("memory", memories(), ids=format_spec)
def test_every_memory_trains(memory: Memory) -> None:
    settings = asdict(memory)
    # Momentum makes every gradient count up to ten times, but not where it is masked soon.
    rate = RATE / 5 if "momentum" in settings else RATE
    shortfall = FORGETFUL if settings.get("decay", 1) < 1 else SHORTFALL_OF_A_PART
    assert gain(PART, rate, memory=memory) >= 1 - shortfall


@pytest.mark.parametrize("exchange", ["sharded", "leader"])
@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_exchanges_train(exchange: str, memory: str) -> None:
    assert gain(PART, exchange=exchange, memory=memory) >= 1 - SHORTFALL_OF_A_PART


@pytest.mark.parametrize("quantiser", ["sign", "qsgd", "qsgd:bits=2,scaled=true"])
def test_pipelines_train(quantiser: str) -> None:
    assert gain(f"topk:ratio=0.1 | {quantiser}") >= 1 - SHORTFALL_OF_A_PART


def test_what_is_lost_for_good_shows() -> None:
    """Methods that say a part of the entries fall short of their margin without a memory."""
    parts = [m for m in usual() if m.family == "sparsification" and not m.traits().variable_length]
    parts = [m for m in parts if wants_residual(m)]
    assert parse(PART) in parts
    for method in parts:
        assert gain(method, memory="none") < 1 - allowed(method)


def test_dense_training_has_neither_stalled_nor_finished() -> None:
    """Or a method that lags could not be told from one that does not."""
    start, half = train("none", STEPS // 2, RATE)
    assert dense_gain() > 0.5 * start
    assert start - half < (1 - max(SHORTFALL.values())) * dense_gain()
