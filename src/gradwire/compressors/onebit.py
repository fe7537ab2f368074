"""1-bit SGD: one bit per entry, and the means of the negative and of the other entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import bucket_count, packed_numel
from gradwire.wire.layout import as_rows


@dataclass(frozen=True)
class OneBit(FusedOneRound):
    """Sends which entries are negative, the mean of those, and the mean of all others.

    No other two numbers would be closer for this mask. With n₋ entries of mean a₋ and n₊ of mean
    a₊ the squared error is |x|² - n₋a₋² - n₊a₊²: a contraction, never worse than EF-SignSGD and
    better where the two means differ in size. With `bucket` the means are over that many
    consecutive entries, as the paper's over a column; 0 is the whole tensor. Zero counts as not
    negative. Infinity makes the mean of its sign infinite; NaN makes its bucket non-finite.
    """

    bucket: int = 0

    examples: ClassVar = ({}, {"bucket": 1024})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Seide et al. 2014, Interspeech"
    message: ClassVar = (
        "n bits (1 = negative), float32 means of negatives and others, one of each per bucket"
    )

    def __post_init__(self) -> None:
        check_whole("onebit", "bucket", self.bucket, 0)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.bucket or 1)

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(1, numel)

    @memoized
    def layout(self, numel: int) -> Layout:
        means = Field(torch.float32, bucket_count(numel, self._bucket(numel)))
        return Layout((Field(torch.uint8, packed_numel(numel, 1)), means, means))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return kernels.on(x.device).sign_means_pack(x, self._bucket(x.numel()))

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None and residual_out is not None  # noqa: PT018
        bucket = self._bucket(x.numel())
        return kernels.on(x.device).sign_means_pack_sum(x, residual, decay, residual_out, bucket)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        bits, low, high = (as_rows(parts) for parts in zip(*messages, strict=True))
        kernels.on(out.device).sign_means_add(
            out, bits, low, high, weight, self._bucket(out.numel())
        )
