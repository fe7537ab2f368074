"""Random-k: a random selection, the same on every rank, so that no positions are sent."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire import kernels
from gradwire.base import Traits, memoized
from gradwire.checks import check_positive_fraction
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat, check_format, count_for_ratio
from gradwire.types import EFInput, EncodeContext


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Sends a random `ratio` of the entries, values only; all ranks draw the same positions.

    One position is drawn from each of k strata of adjacent entries, whose lengths differ by at most
    one. The strata begin at a random offset and wrap around the end, so every entry has probability
    k/n (to 31 random bits), and the expected squared error is 1 - k/n of the squared norm, as for a
    uniform choice. Values are not scaled up by n/k: it is a contraction, to go with a residual, and
    not unbiased. Since all ranks send the same entries, an all-reduce can sum their messages.
    """

    ratio: float
    values: ValueFormat = "fp32"

    sends_indices: ClassVar = False
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "values": "bf16"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Stich, Cordonnier & Jaggi 2018, arXiv:1809.07599"
    message: ClassVar = "k values; positions follow from seed, parameter and step"

    def __post_init__(self) -> None:
        check_positive_fraction("randomk", "ratio", self.ratio)
        check_format("randomk", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(summable=True, rounds_sums=self.values != "fp32", contraction=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        x = ef.total()
        count = self.count(x.numel())
        # Blocks of one entry are one draw from each stratum.
        return kernels.on(x.device).random_blocks(ctx.shared_key(), x.numel(), count, 1, x.device)
