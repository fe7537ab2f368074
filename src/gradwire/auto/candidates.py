"""Candidates of the automatic mode: methods of every family, for all parameters or for groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from gradwire.auto.accuracy_risk import LEVELS, Level
from gradwire.auto.auto import Auto
from gradwire.comm.cost_model import LinkModel
from gradwire.engine.plan import Plan

FP32, BITS16 = "none", "bf16"
"""Methods that lose next to nothing; training starts with one of them."""

QUANTIZERS = ("eightbit", "int4", "qsgd:bits=4")
LOW_RANK = ("powersgd:rank=4", "powersgd:rank=2", "powersgd:rank=1")
SELECTIVE = (
    "efsign",
    "topk:ratio=0.1",
    "topk:ratio=0.01",
    "topk:ratio=0.01 | int4",
)
"""Sparsifiers, pipelines and signs: much of the gradient arrives late."""

Choice: TypeAlias = tuple[tuple[str, str], ...]
"""A method and its exchange: one pair for all parameters, or one for each group."""


@dataclass(frozen=True)
class Candidate:
    """A choice that may be made, and its plan for this model and this number of ranks."""

    choice: Choice
    plan: Plan
    plans: tuple[Plan, ...]
    """The plan of each pair of the choice, as if it were for all parameters."""

    @cached_property
    def spec(self) -> str:
        return self.plan.spec()

    @property
    def is_mixed(self) -> bool:
        """True if groups of parameters have methods of their own."""
        return len(self.choice) > 1

    @property
    def family(self) -> str:
        if self.is_mixed:
            return "mixed"
        return "16 bit" if self.is_uncompressed else self.plan.compressor.family

    @cached_property
    def is_uncompressed(self) -> bool:
        """True if gradients are sent whole, in their own or in 16 bits."""
        return all(
            method.is_dense or method.compressor.traits().suits_small_tensors
            for method in self.plan.methods
        )


def is_admitted(level: Level, config: Auto) -> bool:
    """Returns whether the risk budget admits a method that is rated at this level."""
    return LEVELS.index(level) <= LEVELS.index(config.risk)


def start_index(
    options: Sequence[Candidate], dense_bytes: float, link: LinkModel, size: int
) -> int:
    """Returns the candidate to start with: fp32, or 16 bits where fp32 takes long on the link."""
    whole_s = link.call_s("mean", dense_bytes, size)
    wanted = FP32 if whole_s <= SLOW_STEP_S else BITS16
    return [option.spec for option in options].index(wanted)


SLOW_STEP_S = 0.25
"""If sending all gradients takes longer than this, the measurements are made in 16 bits."""
