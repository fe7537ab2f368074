"""TernGrad: each entry becomes -1, 0 or 1 at random, and the tensor has one scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import OneRound, Traits, memoized
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.layout import as_rows
from gradwire.wire.ternary import check_trits, packed_trits


@dataclass(frozen=True)
class TernGrad(OneRound):
    """Sends -1, 0 or 1 per entry, five to a byte, and the largest magnitude s as their scale.

    An entry x is sent as s sign(x) with probability |x|/s, else as zero, so it is unbiased with
    variance |x| (s - |x|): for n entries at most (√n - 1)/2 of the squared norm in all. With `clip`
    above 0, magnitudes are first clipped at `clip` times their root mean square (2.5 in the paper):
    biased, but the squared error is then within 1 + clip²/8 of the squared norm (clip - 1 from 4
    on) however many entries there are. The mean square is taken around zero, so a constant tensor
    is never clipped. NaN or infinity anywhere makes the whole tensor NaN.
    """

    clip: float = 0.0

    examples: ClassVar = ({}, {"clip": 2.5})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Wen et al. 2017, arXiv:1705.07878"
    message: ClassVar = "n trits, five to a byte; scale as float32"

    def __post_init__(self) -> None:
        number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if not number or not (self.clip == 0 or 1 <= self.clip < math.inf):
            raise ConfigError(f"terngrad: clip must be 0 or at least 1, got {self.clip!r}")

    def variance(self, numel: int) -> float:
        """Returns the bound on the squared error of `numel` entries over the squared norm."""
        if not self.clip:
            return (math.sqrt(max(1, numel)) - 1) / 2
        return 1 + self.clip**2 / 8 if self.clip < 4 else self.clip - 1

    @memoized
    def traits(self) -> Traits:
        bound = f"bound with clip={self.clip} is {self.variance(0):.3g}"
        unclipped = "bound grows as half the root of the number of entries"
        return Traits(
            unbiased=not self.clip,
            why_not=f"its variance {bound if self.clip else unclipped}, not below 1",
            propagates_nonfinite=True,
        )

    @memoized
    def layout(self, numel: int) -> Layout:
        fields = (Field(torch.uint8, packed_trits(numel)), Field(torch.float32, 1))
        return Layout(fields, lambda parts: check_trits(parts[0]))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return kernels.on(x.device).trits_pack(x, self.clip, ctx.own_key())

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        packed, scales = (as_rows(parts) for parts in zip(*messages, strict=True))
        kernels.on(out.device).trits_add(out, packed, scales, weight)
