"""Nested selection: the first two stages of `topk | randomk | qsgd`, a pipeline of three."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from gradwire.base import Traits, memoized
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat
from gradwire.types import EFInput, EncodeContext, mix

_INNER_STREAM = 0x6E657374
"""Marks the inner selection's random numbers, which are independent of the outer one's."""


@dataclass(frozen=True)
class NestedSelection(Sparsifier):
    """Selects with `inner` among the entries that `outer` has selected; sends their positions.

    A random choice among the largest entries is rTop-k (Barnes et al. 2020, arXiv:2005.10761), in
    which ranks send different ones of the entries that are large on all of them. The largest of a
    random choice are found in a fraction of the time that the largest of all take.
    """

    outer: Sparsifier
    inner: Sparsifier
    values: ValueFormat = field(init=False)

    sends_indices: ClassVar = True
    examples: ClassVar = ()
    family: ClassVar = "sparsification"
    paper: ClassVar = "Barnes et al. 2020, arXiv:2005.10761"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.inner.values)

    @memoized
    def traits(self) -> Traits:
        outer, inner = self.outer.traits(), self.inner.traits()
        return Traits(
            unbiased=outer.unbiased and inner.unbiased,
            contraction=outer.contraction and inner.contraction,
            accumulates=outer.accumulates and inner.accumulates,
            variable_length=outer.variable_length or inner.variable_length,
            syncs_host=outer.syncs_host or inner.syncs_host,
            step_dependent=outer.step_dependent or inner.step_dependent,
            propagates_nonfinite=outer.propagates_nonfinite and inner.propagates_nonfinite,
            why_not=outer.why_not or inner.why_not,
            block=outer.block,
        )

    @memoized
    def count(self, numel: int) -> int:
        return self.inner.count(self.outer.count(numel))

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        among = self.outer.select(ef, ctx)
        if not among.numel():
            return among
        total = ef.grad if ef.residual_out is None else ef.residual_out
        # Ranks select different entries among theirs, so each draws its own random numbers.
        lane_id = mix(ctx.lane_id, _INNER_STREAM, ctx.rank)
        inner_ctx = ctx._replace(shape=(among.numel(),), lane_id=lane_id)
        return among[self.inner.select(EFInput(total[among]), inner_ctx)]

    def accumulate_only(self, ef: EFInput, ctx: EncodeContext) -> None:
        self.outer.accumulate_only(ef, ctx)
