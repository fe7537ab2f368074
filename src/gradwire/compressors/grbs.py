"""GRBS: random blocks, the same on every rank, so that no positions are sent."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire import kernels
from gradwire.base import Traits, memoized
from gradwire.checks import check_positive_fraction, check_whole
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat, check_format, count_for_ratio
from gradwire.types import EFInput, EncodeContext


@dataclass(frozen=True)
class GRBS(Sparsifier):
    """Sends a random `ratio` of the entries in blocks of up to `block`; all ranks draw the same.

    Adjacent entries travel together, so reading and writing them is fast, and only values are sent.
    The k entries are cut into the fewest blocks of at most `block`, whose lengths differ by at most
    one; the other n - k are spread between them at random, and all is rotated by a random offset.
    So each entry is sent with probability k/n exactly, and the expected squared error is 1 - k/n of
    the squared norm: a contraction, not unbiased. An all-reduce can sum the messages. Entries that
    are not drawn stay in the residual, NaN and infinity too.
    """

    ratio: float
    block: int = 1024
    values: ValueFormat = "fp32"

    sends_indices: ClassVar = False
    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.1, "block": 16, "values": "bf16"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Xie et al. 2020, arXiv:2007.13221"
    message: ClassVar = "k values; positions follow from seed, parameter and step"

    def __post_init__(self) -> None:
        check_positive_fraction("grbs", "ratio", self.ratio)
        check_whole("grbs", "block", self.block, 1)
        check_format("grbs", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(summable=True, rounds_sums=self.values != "fp32", contraction=True)

    @memoized
    def count(self, numel: int) -> int:
        return count_for_ratio(self.ratio, numel)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        x = ef.total()
        count = self.count(x.numel())
        return kernels.on(x.device).random_blocks(
            ctx.shared_key(), x.numel(), count, self.block, x.device
        )
