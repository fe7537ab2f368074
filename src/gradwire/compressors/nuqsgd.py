"""NUQSGD: stochastic rounding to levels that halve towards zero, per bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire import kernels
from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import bucket_count, pack_bits, packed_numel, unpack_bits


@dataclass(frozen=True)
class NUQSGD(OneRound):
    """Rounds each entry at random to one of the two nearest of the levels 0, 2^-s ... 1/2, 1.

    Levels are shares of the Euclidean norm of a bucket, s = 2^(bits-1) - 2, and each has a sign.
    Few entries are near the norm, so levels are dense where entries are: QSGD with `norm=l2` has
    uniform levels. An entry is rounded up with the probability that makes it unbiased. Entries
    above the lowest level t = 2^-s have a variance of at most 1/8 of their square, those below of
    (t - r) r for a share r: at most b = 1/8 + 2u²/9 of the squared norm in all, where u = t √d for
    buckets of d (u - 1 if u is above 9/4). Only where b is below 1 is it a contraction too. A code
    is the index of a level, with the sign as its highest bit. NaN or infinity makes its bucket
    non-finite; zeros decode to zeros. Made of torch operations: slower than methods with a kernel.
    """

    bits: int = 4
    bucket: int = 1024

    examples: ClassVar = ({"bits": 4}, {"bits": 3, "bucket": 32}, {"bits": 2})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Ramezani-Kebrya et al. 2021, arXiv:2104.13818"
    message: ClassVar = "n codes of b bits, one float32 scale per bucket"

    def __post_init__(self) -> None:
        check_whole("nuqsgd", "bits", self.bits, 2, 8)
        check_whole("nuqsgd", "bucket", self.bucket, 1)

    def variance(self) -> float:
        """Returns the bound on the squared error, relative to the squared norm."""
        u = math.sqrt(self.bucket) * 2.0 ** (2 - (1 << (self.bits - 1)))
        return 1 / 8 + 2 * u**2 / 9 if u <= 9 / 4 else u - 1

    @memoized
    def traits(self) -> Traits:
        variance = self.variance()
        return Traits(
            unbiased=True,
            contraction=variance < 1,
            why_not=f"its variance bound with bits={self.bits}, bucket={self.bucket} is "
            f"{variance:.3g}, not below 1 (use more bits or a smaller bucket)",
            propagates_nonfinite=True,
            block=self.bucket,
        )

    @memoized
    def layout(self, numel: int) -> Layout:
        codes = Field(torch.uint8, packed_numel(numel, self.bits))
        return Layout((codes, Field(torch.float32, bucket_count(numel, self.bucket))))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        rows = pad(x, (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        # In float64, since the sum of squares may overflow float32.
        norms = rows.norm(dim=1, dtype=torch.float64).to(x.dtype)
        share = (rows.abs() / norms.unsqueeze(1)).view(-1)[: x.numel()]
        # A bucket of zeros or of non-finite entries has the share NaN; its norm distinguishes them.
        share = share.nan_to_num(0.0, 0.0).clamp(max=1.0)
        levels = levels_of(self.bits, x.device)
        lower = (torch.bucketize(share, levels, right=True) - 1).clamp(max=levels.numel() - 2)
        chance = (share - levels[lower]) / (levels[lower + 1] - levels[lower])
        up = kernels.on(x.device).uniform(ctx.own_key(), x.numel(), x.device) < chance
        codes = lower + up + (x < 0) * levels.numel()
        return pack_bits(codes, self.bits), norms

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        levels = levels_of(self.bits, out.device)
        signed = torch.cat([levels, -levels])
        for packed, norms in messages:
            codes = unpack_bits(packed, self.bits, out.numel())
            scale = norms.repeat_interleave(self.bucket)[: out.numel()]
            out.add_(signed[codes] * scale, alpha=weight)


@cache
def levels_of(bits: int, device: torch.device) -> Tensor:
    """Returns the levels, ascending, cached per device: a CUDA graph cannot copy from the host."""
    lowest = (1 << (bits - 1)) - 2
    levels = [0.0, *(2.0**-exponent for exponent in range(lowest, -1, -1))]
    return torch.tensor(levels).to(device, non_blocking=True)
