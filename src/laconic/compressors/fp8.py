"""8-bit floating point, scaled bucket by bucket so that nothing overflows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import OneRound, Traits
from laconic.errors import ConfigError
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.buckets import bucket_count, in_buckets, spread

# Each with the largest power of two that it has: scaling by that is exact on every device.
FORMATS = {"e4m3": (torch.float8_e4m3fn, 2.0**8), "e5m2": (torch.float8_e5m2, 2.0**15)}


@dataclass(frozen=True)
class Fp8(OneRound):
    """Sends a byte an entry, e4m3 or e5m2, and the largest magnitude of each bucket.

    Entries are divided by that largest one and rounded to the nearest; it is exact itself. With
    three bits of fraction (e4m3) the others are off by at most 1/16 of themselves down to 2^-14 of
    the largest, with two (e5m2) by 1/8 down to 2^-29; below, steps are even, and end at zero. No
    entry is off by more than itself: a contraction. NaN or infinity spoils its bucket.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    bucket: int = 1024

    examples: ClassVar = ({}, {"format": "e5m2", "bucket": 128})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Micikevicius et al. 2022, arXiv:2209.05433"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"fp8: format must be one of {[*FORMATS]}, got {self.format!r}")
        check_whole("fp8", "bucket", self.bucket, 1)

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        scales = Field(torch.float32, bucket_count(numel, self.bucket))
        return Layout((Field(torch.uint8, numel), scales))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        dtype, top = FORMATS[self.format]
        rows = in_buckets(x, self.bucket)
        scales = rows.abs().amax(dim=1)
        # Nothing over nothing, in a bucket of zeros, is zero.
        unit = (rows / scales.unsqueeze(1)).nan_to_num(0.0).view(-1)[: x.numel()]
        return (unit * top).to(dtype).view(torch.uint8), scales

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        dtype, top = FORMATS[self.format]
        for code, scales in messages:
            unit = code.view(dtype).to(torch.float32) / top
            out.add_(unit * spread(scales, self.bucket, out.numel()), alpha=weight)
