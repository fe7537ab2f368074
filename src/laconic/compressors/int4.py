"""Block-wise 4-bit integers: nearest rounding, one scale a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import OneRound, Traits
from laconic.errors import ConfigError
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.bits import pack_bits, packed_numel, unpack_bits

LEVELS = 7
SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Int4(OneRound):
    """Sends each entry as the nearest of 15 levels, and each block's largest magnitude.

    Levels are the multiples of a seventh of that magnitude, so an entry is off by a fourteenth of
    it at most, and never by more than its own size; the largest is exact (within 2^-8 of it with
    `scale=bf16`, which holds magnitudes up to 3.39e38). A contraction, then: with a residual what
    rounding loses is said later, as in LoCo. A block with NaN or infinity becomes NaN.
    """

    block: int = 128
    scale: Literal["fp32", "bf16"] = "fp32"

    examples: ClassVar = ({}, {"block": 32, "scale": "bf16"})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Xie et al. 2024, arXiv:2407.04480"

    def __post_init__(self) -> None:
        check_whole("int4", "block", self.block, 1)
        if self.scale not in SCALES:
            raise ConfigError(f"int4: scale must be one of {[*SCALES]}, got {self.scale!r}")

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        scales = Field(SCALES[self.scale], -(-numel // self.block))
        return Layout((Field(torch.uint8, packed_numel(numel, 4)), scales))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        rows = x.new_zeros(-(-x.numel() // self.block) * self.block)
        rows[: x.numel()] = x
        rows = rows.view(-1, self.block)
        scales = rows.abs().amax(dim=1).to(SCALES[self.scale])
        # Dividing first, since a seventh of the smallest numbers is zero. Where all is zero or not
        # finite the quotient is NaN, and the scale says which.
        level = (rows / scales.to(x.dtype).unsqueeze(1) * LEVELS).round_()
        level = level.nan_to_num_(0.0).clamp_(-LEVELS, LEVELS).view(-1)[: x.numel()]
        return pack_bits(level.long() + LEVELS, 4), scales

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        for codes, scales in messages:
            level = unpack_bits(codes, 4, out.numel()).to(out.dtype) - LEVELS
            each = scales.to(out.dtype).repeat_interleave(self.block)[: out.numel()]
            out.add_(level / LEVELS * each, alpha=weight)
