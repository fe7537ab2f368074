"""Candidates of the automatic mode: methods of every family, with the exchange for this link."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.auto.accuracy_risk import LEVELS, Level
from gradwire.auto.auto import Auto
from gradwire.comm.cost_model import LinkModel
from gradwire.engine.legality import wants_residual
from gradwire.engine.make_plan import choose_exchange, make_plan
from gradwire.engine.plan import Plan
from gradwire.spec import format_spec, memory_of, parse

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


@dataclass(frozen=True)
class Candidate:
    """A method that may be chosen, and its plan for this model and this number of ranks."""

    spec: str
    plan: Plan

    @property
    def family(self) -> str:
        return "16 bit" if self.is_uncompressed else self.plan.compressor.family

    @property
    def is_uncompressed(self) -> bool:
        """True if gradients are sent whole, in their own or in 16 bits."""
        return self.plan.is_dense or self.plan.compressor.traits().suits_small_tensors


def candidates(
    plan: Plan, tensors: Iterable[Tensor], size: int, link: LinkModel, adaptive: bool
) -> list[Candidate]:
    """Returns the methods to compare; all but the first two only if they suit the optimiser.

    An adaptive optimiser divides entries by running magnitudes. What arrives late arrives at once,
    in the magnitude too, so sparsifiers and signs of gradients stall training under it. Settings of
    the integration, such as the size of chunks, are those of its first `plan`.
    """
    shapes = list(tensors)
    specs = (FP32, BITS16, *QUANTIZERS, *LOW_RANK, *(() if adaptive else SELECTIVE))
    return [_candidate(spec, plan, shapes, size, link) for spec in specs]


def _candidate(
    spec: str, first: Plan, tensors: list[Tensor], size: int, link: LinkModel
) -> Candidate:
    compressor = parse(spec)
    memory = memory_of("residual" if wants_residual(compressor) else "none")
    exchange = choose_exchange(compressor, memory, tensors, size, link)
    plan = make_plan(compressor, memory, exchange, tensors, size)
    plan = replace(first, compressor=compressor, memory=memory, exchange=plan.exchange)
    return Candidate(format_spec(plan.compressor), plan)


def is_admitted(level: Level, config: Auto) -> bool:
    """Returns whether the risk budget admits a method that is rated at this level."""
    return LEVELS.index(level) <= LEVELS.index(config.risk)


def start_index(options: list[Candidate], dense_bytes: float, link: LinkModel, size: int) -> int:
    """Returns the candidate to start with: fp32, or 16 bits where fp32 takes long on the link."""
    whole_s = link.call_s("mean", dense_bytes, size)
    wanted = FP32 if whole_s <= SLOW_STEP_S else BITS16
    return [option.spec for option in options].index(wanted)


SLOW_STEP_S = 0.25
"""If sending all gradients takes longer than this, the measurements are made in 16 bits."""
