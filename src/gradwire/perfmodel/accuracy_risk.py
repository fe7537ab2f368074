"""Accuracy risk of a method, estimated from its compression error on real gradients.

The relative error is the norm of what one step does not send, over the norm of gradient plus
residual. Its effect depends on the kind of method, so both are rated together. The rating is a rule
of thumb; only a training run tells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.perfmodel.compute import Bucket
from gradwire.simulate import Simulation

Level: TypeAlias = Literal["none", "low", "medium", "high"]
LEVELS: tuple[Level, ...] = ("none", "low", "medium", "high")
_NODES = 2


@dataclass(frozen=True)
class Risk:
    level: Level
    relative_error: float
    why: str

    def words(self) -> str:
        return f"{self.level} ({self.why})"


def judge(plan: Plan, error: float, size: int) -> Risk:
    """What to think of a relative error that two workers have seen, for `size` of them."""
    traits = plan.compressor.traits()
    if plan.compressor.family == "dense":
        return Risk("none", error, "all is said")
    if plan.counts_votes():
        return Risk("high", error, "votes: needs a learning rate of its own")
    if traits.suits_small_tensors:
        return Risk("none" if error < 0.01 else "low", error, "rounds to 16 bits")
    if plan.memory.needs_contraction:
        return Risk(_delay_level(error), error, f"{1 - error**2:.0%} said now, the rest later")
    if traits.unbiased:
        noise = error * sqrt(_NODES / size)
        return Risk(_noise_level(noise), error, f"noise of {noise:.2g} times the gradient")
    return Risk("high", error, f"{error**2:.0%} lost for good")


def _delay_level(error: float) -> Level:
    """With a residual nothing is lost; what is said at once tells how long the rest waits."""
    said = 1 - error**2
    return "low" if said >= 0.3 else "medium" if said >= 0.05 else "high"


def _noise_level(noise: float) -> Level:
    """Without bias the mean of all workers is right on average, and batches are noisy as well."""
    return "low" if noise <= 0.5 else "medium" if noise <= 2 else "high"


def lost(plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]]) -> float:
    """The relative error of the last of some steps between two workers (or nodes)."""
    workers = _NODES * (plan.node() or 1)
    lanes = [Engine(plan, tensors, rank, workers, seed=0) for rank in range(workers)]
    simulation = Simulation(lanes)
    gradients = [{n: g for bucket in step for n, g in zip(*bucket, strict=True)} for step in steps]
    for number in range(len(gradients)):
        given = [gradients[(number + rank) % len(gradients)] for rank in range(workers)]
        due = _mean([_due(lane, own) for lane, own in zip(lanes, given, strict=True)])
        told = simulation.step(given)
    for own in lanes:
        own.close()
    lost = torch.stack([(due[name] - told[name]).norm() for name in due]).norm()
    whole = torch.stack([tensor.norm() for tensor in due.values()]).norm()
    return float(lost / whole) if whole > 0 else 0.0


def _due(lanes: Engine, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a worker has to say: its gradient, and what waits."""
    due = {}
    for name, gradient in gradients.items():
        lane = lanes.lanes[name]
        waiting = lane.memory.unsent(lane.memory_state)
        due[name] = gradient if waiting is None else gradient + waiting.view(gradient.shape)
    return due


def _mean(workers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([w[name] for w in workers]).mean(0) for name in workers[0]}
