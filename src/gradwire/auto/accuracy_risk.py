"""Accuracy risk of a method, estimated from its compression error on real gradients.

The relative error is the norm of what one step does not send, over the norm of gradient plus
residual. Its effect depends on the kind of method and of the optimiser, so all are rated together.
The rating is a rule of thumb; only a training run gives certainty.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, TypeAlias

from gradwire.engine.plan import Plan

Level: TypeAlias = Literal["none", "low", "medium", "high"]
LEVELS: tuple[Level, ...] = ("none", "low", "medium", "high")
NODES = 2
"""Workers, or nodes, with which errors are measured."""
_SENT_AT_ONCE = 0.9
"""Share above which an adaptive optimiser hardly notices the rest."""
_SENT_AT_LEAST = 0.05
"""Share below which a run falls behind by too many steps, whatever the optimiser."""


@dataclass(frozen=True)
class Risk:
    level: Level
    relative_error: float
    why: str

    def describe(self) -> str:
        return f"{self.level} ({self.why})"


def assess_risk(plan: Plan, error: float, size: int, adaptive: bool) -> Risk:
    """Rates a relative error that was measured with two workers, for `size` of them.

    `adaptive`: the optimiser rescales every entry, as Adam does.
    """
    # With policies the error is that of all parameters, so it is not known which method causes it.
    risks = [_assess(plan.with_method(m), error, size, adaptive) for m in plan.methods]
    return max(risks, key=lambda risk: LEVELS.index(risk.level))


def _assess(plan: Plan, error: float, size: int, adaptive: bool) -> Risk:
    """Rates the error of a plan with one method."""
    traits = plan.compressor.traits()
    if plan.compressor.family == "dense":
        return Risk("none", error, "sends everything")
    if plan.counts_votes:
        return Risk("high", error, "votes: needs a learning rate of its own")
    if traits.suits_small_tensors:
        return Risk("none" if error < 0.01 else "low", error, "rounds to 16 bits")
    if plan.memory.needs_contraction:
        level = _adaptive_level(plan, error) if adaptive else _delay_level(error)
        share = f"{1 - error**2:.0%} of the gradient's squared norm"
        return Risk(level, error, f"{share} sent at once, the rest later")
    if traits.unbiased:
        noise = error * sqrt(NODES / size)
        return Risk(_noise_level(noise), error, f"noise of {noise:.2g} times the gradient")
    return Risk("high", error, f"{error**2:.0%} lost for good")


def _delay_level(error: float) -> Level:
    """Rates a method with a residual, which loses nothing, by the share that it sends at once."""
    sent = 1 - error**2
    return "low" if sent >= 0.3 else "medium" if sent >= _SENT_AT_LEAST else "high"


def _adaptive_level(plan: Plan, error: float) -> Level:
    """Rates a method with a residual under an optimiser that divides by running magnitudes.

    What arrives late arrives at once, in the magnitude too, so that the steps of such entries are
    too short (docs/results/gpt-adamw.md): nearly all must be sent at once. A low-rank method sends
    a part of every entry at every step, and loses less.
    """
    sent = 1 - error**2
    if sent >= _SENT_AT_ONCE:
        return "low"
    low_rank = plan.compressor.family == "low rank" and sent >= _SENT_AT_LEAST
    return "medium" if low_rank else "high"


def _noise_level(noise: float) -> Level:
    """Rates an unbiased method by its noise: batches are noisy as well."""
    return "low" if noise <= 0.5 else "medium" if noise <= 2 else "high"
