"""8-bit dynamic tree: a byte an element, fine near the largest and coarse over seven decades."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import OneRound, Traits
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.buckets import bucket_count, in_buckets, spread

DECADES = 7
"""One for each bit beside the sign."""


@dataclass(frozen=True)
class EightBit(OneRound):
    """Sends a byte an entry, the nearest of 255 levels, and the largest magnitude of each bucket.

    After the sign, the zero bits before the first one count the decades below the largest; the k
    bits after it divide that decade into 2^k even steps. A level is the upper end of its step, so
    the largest entry of a bucket is exact; the others are off by at most 0.71 % of it, and down to
    a tenth of it by at most 7 % of themselves. Zero is a level, so no entry is off by more than
    itself: a contraction. NaN or infinity spoils its bucket.
    """

    bucket: int = 1024

    examples: ClassVar = ({}, {"bucket": 128})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Dettmers 2015, arXiv:1511.04561"

    def __post_init__(self) -> None:
        check_whole("eightbit", "bucket", self.bucket, 1)

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        scales = Field(torch.float32, bucket_count(numel, self.bucket))
        return Layout((Field(torch.uint8, numel), scales))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        rows = in_buckets(x, self.bucket).abs()
        scales = rows.amax(dim=1)
        unit = (rows / scales.unsqueeze(1)).view(-1)[: x.numel()]
        level = levels(x.device)
        middle = ((level[1:] + level[:-1]) / 2).to(torch.float32)
        # Nothing over nothing, in a bucket of zeros, is zero.
        code = torch.bucketize(unit.nan_to_num(0.0), middle, out_int32=True)
        return (code + 128 * (x < 0)).to(torch.uint8), scales

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        level = levels(out.device).to(torch.float32)
        meaning = torch.cat([level, -level])
        for code, scales in messages:
            said = meaning.index_select(0, code.to(torch.int32))
            out.add_(said * spread(scales, self.bucket, out.numel()), alpha=weight)


def levels(device: torch.device) -> Tensor:
    """What the 128 codes without a sign mean, ascending from 0 to 1, in float64."""
    tree = [torch.zeros(1, dtype=torch.float64, device=device)]
    for k in range(DECADES):
        step = torch.arange(1, (1 << k) + 1, dtype=torch.float64, device=device)
        tree.append((step * 0.9 / (1 << k) + 0.1) * 10.0 ** (k + 1 - DECADES))
    return torch.cat(tree)
