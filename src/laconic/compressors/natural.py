"""Natural compression: powers of two, a byte each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.contract import OneRound, Traits
from laconic.kernels.reference.random import random_bits
from laconic.types import Field, Layout, Parts, Turn

TOP = 126
"""The code of the largest power in a message; 0 is zero."""
BAD = 127
"""The code of what is not finite."""
FIELD = 52
"""Where the exponent begins in a float64, above its fraction."""
LARGEST = 1023 + 127
"""The exponent field of 2^127, the largest power that float32 has."""


@dataclass(frozen=True)
class Natural(OneRound):
    """Rounds each entry to a power of two, up or down so that its expectation is exact.

    Sent are the sign and 7 bits of exponent, counted down from the largest, told once a tensor. An
    entry between 2^e and 2^(e+1) goes up with the chance of its place between them; the variance
    is at most 1/8 of its square (at 4/3 of a power), so it is a contraction too. Powers of two are
    exact. Only at two edges is the expectation not exact: entries below 2^-124 of the largest
    become zero, and those above 2^127 go down. Infinity stays itself; NaN arrives as infinity.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Horváth et al. 2019, arXiv:1905.10988"

    def traits(self) -> Traits:
        return Traits(unbiased=True, contraction=True)

    def layout(self, numel: int) -> Layout:
        return Layout((Field(torch.uint8, numel), Field(torch.int32, 1)))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        # As float64, since there even the smallest float32 has its full exponent.
        size = x.abs().to(torch.float64).view(torch.int64)
        bad = size >= 2047 << FIELD
        # 23 random bits beside the 23 of the fraction: the carry comes with its very chance.
        noise = (random_bits(turn.own_key(), x.numel(), x.device) & 0x7FFFFF) << (FIELD - 23)
        power = ((size + noise) >> FIELD).clamp(max=LARGEST).masked_fill(bad, 0)
        base = (power.amax().view(1) - TOP).clamp(min=0) if x.numel() else power.new_zeros(1)
        code = (power - base).clamp(min=0).masked_fill(bad, BAD) + 128 * (x < 0)
        return code.to(torch.uint8), base.to(torch.int32)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        for code, base in messages:
            out.add_(_meaning(base).index_select(0, code.to(torch.int32)), alpha=weight)


def _meaning(base: Tensor) -> Tensor:
    """The float32 number for each of the 256 codes."""
    code = torch.arange(128, device=base.device)
    power = (code + base).clamp(0, LARGEST).masked_fill(code == 0, 0)
    power = power.masked_fill(code == BAD, 2047)
    size = (power << FIELD).view(torch.float64).to(torch.float32)
    return torch.cat([size, -size])
