"""QSGD: stochastic rounding to a few levels, bucket by bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic import kernels
from laconic.checks import check_whole
from laconic.contract import Fused, Traits
from laconic.errors import ConfigError
from laconic.types import Field, Given, Layout, Parts, Turn
from laconic.wire.bits import packed_numel


@dataclass(frozen=True)
class QSGD(Fused):
    """Rounds each entry up or down to one of 2^bits - 1 levels so that its expectation is exact.

    Levels are multiples of scale/s with s = 2^(bits-1) - 1, where the scale of a bucket is its
    largest magnitude (`norm=max`) or its Euclidean norm (`norm=l2`, as in the paper). The variance
    is at most b = min(d/4s², √d/s) of the squared norm for buckets of d. Only where b is below 1 is
    it a contraction too, and may go with a residual. `scaled` divides all that is said by 1 + b:
    then it is one for any b, by 1/(1 + b), and no longer unbiased. NaN or infinity spoils its
    bucket; a bucket of zeros is said as zeros.
    """

    bits: int = 4
    bucket: int = 128
    norm: Literal["max", "l2"] = "max"
    scaled: bool = False

    examples: ClassVar = (
        {"bits": 4},
        {"bits": 2},
        {"bits": 8, "bucket": 512, "norm": "l2"},
        {"bits": 2, "scaled": True},
    )
    family: ClassVar = "quantisation"
    paper: ClassVar = "Alistarh et al. 2017, arXiv:1610.02132"

    def __post_init__(self) -> None:
        check_whole("qsgd", "bits", self.bits, 2, 8)
        check_whole("qsgd", "bucket", self.bucket, 1)
        if self.norm not in ("max", "l2"):
            raise ConfigError(f"qsgd: norm must be 'max' or 'l2', got {self.norm!r}")

    def variance(self) -> float:
        """The bound on the squared error, relative to the squared norm."""
        levels = (1 << (self.bits - 1)) - 1
        return min(self.bucket / (4 * levels**2), math.sqrt(self.bucket) / levels)

    def traits(self) -> Traits:
        variance = self.variance()
        return Traits(
            unbiased=not self.scaled,
            contraction=self.scaled or variance < 1,
            why_not=f"its variance bound with bits={self.bits}, bucket={self.bucket} is "
            f"{variance:.3g}, not below 1 (use more bits, a smaller bucket, or scaled=true)",
        )

    def layout(self, numel: int) -> Layout:
        scales = Field(torch.float32, -(-numel // self.bucket))
        return Layout((Field(torch.uint8, packed_numel(numel, self.bits)), scales))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        l2 = self.norm == "l2"
        codes, scales = kernels.at(x).round_pack(x, self.bits, self.bucket, l2, turn.own_key())
        return codes, scales / (1 + self.variance()) if self.scaled else scales

    def take(self, given: Given, turn: Turn) -> Parts:
        x, residual, left, decay = given
        assert residual is not None and left is not None  # noqa: PT018
        if self.scaled:
            # The kernel would leave what the codes say before they are scaled.
            parts = self.compress(given.total(), turn)
            self.add_to(left, [parts], -1.0, turn)
            return parts
        setting = self.bits, self.bucket, self.norm == "l2", turn.own_key()
        return kernels.at(x).round_pack_sum(x, residual, decay, left, *setting)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        codes = torch.stack([codes for codes, _ in messages])
        scales = torch.stack([scales for _, scales in messages]) * weight
        kernels.at(out).round_add(out, codes, scales, self.bits, self.bucket)
