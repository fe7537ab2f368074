"""Signs with one scale: the quantiser of SignTop-k, for pipelines as `topk:ratio=0.01 | sign`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import packed_numel
from gradwire.wire.layout import as_rows


@dataclass(frozen=True)
class Sign(OneRound):
    """Sends the signs of k entries, and their m-norm over k as the scale: `norm` is m.

    With norm 1 the scale is the mean magnitude, the closest there is: the squared error is
    |x|² - |x|₁²/k (EF-SignSGD in one dense message). A larger norm gives a smaller scale and a
    larger error; as |x|_m <= |x|₁ it still removes at least |x|_m²/k of |x|². So it is a
    contraction, by 1/k at norm 1 and k^(2/m - 2) from 2 on; behind top-k of n entries by 1/n and
    k^(2/m - 1)/n. Zero counts as positive; a tensor of zeros decodes to zeros. NaN or infinity
    anywhere makes all entries non-finite.
    """

    norm: int = 1

    examples: ClassVar = ({}, {"norm": 2})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Basu et al. 2019, arXiv:1906.02367"
    message: ClassVar = "n bits (1 = negative), scale as float32"

    def __post_init__(self) -> None:
        check_whole("sign", "norm", self.norm, 1, 6)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def layout(self, numel: int) -> Layout:
        return Layout((Field(torch.uint8, packed_numel(numel, 1)), Field(torch.float32, 1)))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        bits, mean = kernels.on(x.device).sign_pack(x)
        if self.norm == 1 or not x.numel():
            return bits, mean
        # Powers up to the sixth of the largest and smallest float32 are in the range of float64.
        norm = torch.linalg.vector_norm(x, self.norm, dtype=torch.float64)
        return bits, (norm / x.numel()).to(x.dtype).view(1)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        bits, scales = (as_rows(parts) for parts in zip(*messages, strict=True))
        kernels.on(out.device).sign_add(out, bits, scales, weight)
