"""Every compressor, memory and exchange of the catalogue trains a model nearly as well as dense.

Compressors run in their usual setting with their default memory and exchange; memories and
exchanges run with top-k at 1 %, which leaves most to them. A student learns the classes that a
fixed random teacher gives to random inputs, on four simulated workers with data of their own.
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
from gradwire.engine.legality import wants_residual
from gradwire.spec import compressor_classes, format_spec, memory_classes, parse

WORKERS, EXAMPLES, INPUTS, HIDDEN, CLASSES = 4, 128, 64, 32, 32
STEPS = 150
RATE = 0.15
VOTE_RATE = 0.006
"""Learning rate for votes: their mean is +1 or -1, so a step moves every weight by this."""

SHORTFALL = {"dense": 0.02, "quantisation": 0.05}
"""Allowed shortfall, relative to the decrease of the loss in dense training, by family.

Methods that send something of every entry in every step follow dense training closely.
"""
SPARSE_SHORTFALL = 0.1
"""For methods that send about a hundredth per step and rely on error feedback for the rest."""

RANDOM_SHORTFALL = 0.35
"""For random selection: a third of the entries is not sent once in the first hundred steps, which
costs a quarter. More would be a defect."""

DECAY_SHORTFALL = 0.3
"""For a residual that decays by a tenth per step, while an entry waits for a hundred steps."""

SPARSE = "topk:ratio=0.01"
"""Sends little, so that the result depends on the memory and the exchange."""


class Task(NamedTuple):
    inputs: Tensor  # [workers, examples, inputs]
    labels: Tensor  # [workers, examples]


def usual_methods() -> list[Compressor]:
    """Returns each method in its usual setting."""
    return [cls(**cls.examples[0]) for cls in compressor_classes().values()]


@cache
def task() -> Task:
    """Returns the data; the teacher has a hidden layer, so the student cannot copy it."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(WORKERS, EXAMPLES, INPUTS, generator=rng)
    first = torch.randn(INPUTS, HIDDEN, generator=rng)
    second = torch.randn(HIDDEN, CLASSES, generator=rng)
    return Task(inputs, ((inputs @ first).relu() @ second).argmax(dim=2))


def gradients(student: dict[str, Tensor]) -> tuple[float, list[dict[str, Tensor]]]:
    """Returns the loss over all data, and each worker's gradients on its own data."""
    # One copy per worker, so that one backward pass gives separate gradients.
    own = {n: p.expand(WORKERS, *p.shape).clone().requires_grad_() for n, p in student.items()}
    outputs = torch.baddbmm(own["bias"][:, None], task().inputs, own["weight"])
    losses = cross_entropy(outputs.transpose(1, 2), task().labels, reduction="none").mean(dim=1)
    found = torch.autograd.grad(losses.sum(), list(own.values()))
    separate = [{n: g[rank] for n, g in zip(own, found, strict=True)} for rank in range(WORKERS)]
    return float(losses.detach().mean()), separate


def memories() -> list[Memory]:
    """Returns every memory in all its example settings, except `none`."""
    found = [cls(**example) for cls in memory_classes().values() for example in cls.examples]
    return [memory for memory in found if memory.needs_contraction]


def train(
    method: Compressor | str,
    steps: int,
    rate: float,
    memory: Memory | str | None = None,
    exchange: str = "auto",
) -> tuple[float, float]:
    """Returns the loss at the start and at the end."""
    student = {"weight": torch.zeros(INPUTS, CLASSES), "bias": torch.zeros(CLASSES)}
    sim = gradwire.simulate(student, method, workers=WORKERS, memory=memory, exchange=exchange)
    if not isinstance(method, str):
        lane = sim.workers[0].lanes["weight"]
        assert lane.compressor == method, (
            "the weight is too small for this method, and is sent dense"
        )
    start, _ = gradients(student)
    for _ in range(steps):
        means = sim.step(gradients(student)[1])
        student = {name: p - rate * means[name] for name, p in student.items()}
    return start, gradients(student)[0]


@cache
def dense_gain() -> float:
    """Returns the decrease of the loss without compression."""
    start, end = train("none", STEPS, RATE)
    return start - end


def gain(method: Compressor | str, rate: float = RATE, **options: Memory | str) -> float:
    """Returns the decrease of the loss, relative to that without compression."""
    start, end = train(method, STEPS, rate, **options)
    return (start - end) / dense_gain()


def allowed(method: Compressor) -> float:
    if isinstance(method, Sparsifier) and not method.sends_indices:
        return RANDOM_SHORTFALL
    return SHORTFALL.get(method.family, SPARSE_SHORTFALL)


@pytest.mark.parametrize("method", usual_methods(), ids=format_spec)
def test_every_method_trains(method: Compressor) -> None:
    rate = VOTE_RATE if method.traits().is_vote else RATE
    assert gain(method, rate) >= 1 - allowed(method)


@pytest.mark.parametrize("memory", memories(), ids=format_spec)
def test_every_memory_trains(memory: Memory) -> None:
    settings = asdict(memory)
    # Momentum makes a gradient count up to ten times, but less where it is masked soon.
    rate = RATE / 5 if "momentum" in settings else RATE
    shortfall = DECAY_SHORTFALL if settings.get("decay", 1) < 1 else SPARSE_SHORTFALL
    assert gain(SPARSE, rate, memory=memory) >= 1 - shortfall


@pytest.mark.parametrize("exchange", ["sharded", "leader"])
@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_exchanges_train(exchange: str, memory: str) -> None:
    assert gain(SPARSE, exchange=exchange, memory=memory) >= 1 - SPARSE_SHORTFALL


@pytest.mark.parametrize("quantiser", ["sign", "qsgd", "qsgd:bits=2,scaled=true"])
def test_pipelines_train(quantiser: str) -> None:
    assert gain(f"topk:ratio=0.1 | {quantiser}") >= 1 - SPARSE_SHORTFALL


def test_sparse_methods_fall_short_without_a_memory() -> None:
    """Shows that the margins are tight enough to notice entries that are lost."""
    parts = [
        m
        for m in usual_methods()
        if m.family == "sparsification" and not m.traits().variable_length
    ]
    parts = [m for m in parts if wants_residual(m)]
    assert parse(SPARSE) in parts
    for method in parts:
        assert gain(method, memory="none") < 1 - allowed(method)


def test_dense_training_has_neither_stalled_nor_finished() -> None:
    """Otherwise a method that lags could not be distinguished from one that does not."""
    start, half = train("none", STEPS // 2, RATE)
    assert dense_gain() > 0.5 * start
    assert start - half < (1 - max(SHORTFALL.values())) * dense_gain()
