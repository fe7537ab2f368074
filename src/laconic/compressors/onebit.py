"""1-bit SGD: one bit an element, and a mean for each of the two sides of zero."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import OneRound, Traits
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.bits import pack_bits, packed_numel, unpack_bits
from laconic.wire.buckets import bucket_count, in_buckets, spread


@dataclass(frozen=True)
class OneBit(OneRound):
    """Sends which entries are negative, the mean of those, and the mean of all others.

    No other two numbers would be closer for this mask. With n₋ entries of mean a₋ and n₊ of mean
    a₊ the squared error is |x|² - n₋a₋² - n₊a₊²: a contraction, never worse than EF-SignSGD and
    better where the two sides differ. With `bucket` the means are over that many neighbours, as
    the paper's over a column; 0 is the whole tensor. Zero counts as not negative. Infinity makes
    the mean of its side infinite; NaN spoils its bucket.
    """

    bucket: int = 0

    examples: ClassVar = ({}, {"bucket": 1024})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Seide et al. 2014, Interspeech"

    def __post_init__(self) -> None:
        check_whole("onebit", "bucket", self.bucket, 0)

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(1, numel)

    def layout(self, numel: int) -> Layout:
        means = Field(torch.float32, bucket_count(numel, self._bucket(numel)))
        return Layout((Field(torch.uint8, packed_numel(numel, 1)), means, means))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        bucket = self._bucket(x.numel())
        rows = in_buckets(x, bucket)
        below = (rows < 0).sum(dim=1)
        above = bucket - below
        # What fills up the last bucket is no entry.
        above[-1:] -= rows.numel() - x.numel()
        low = _mean(rows.clamp(max=0).sum(dim=1, dtype=torch.float64), below)
        high = _mean(rows.clamp(min=0).sum(dim=1, dtype=torch.float64), above)
        return pack_bits(x < 0, 1), low, high

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        numel, bucket = out.numel(), self._bucket(out.numel())
        for bits, low, high in messages:
            negative = unpack_bits(bits, 1, numel).to(torch.bool)
            said = torch.where(negative, spread(low, bucket, numel), spread(high, bucket, numel))
            out.add_(said, alpha=weight)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """The sum over the count, as float32; a sum over nothing as it is: zero, or NaN."""
    return (total / count.clamp(min=1)).to(torch.float32)
